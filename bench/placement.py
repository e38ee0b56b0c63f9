"""Placement: how even the ranks are, how little moves, and how long deciding takes.

    .venv/bin/python bench/placement.py [--json FILE] [--quick] [--part NAME]

Loads follow Zipf's law and drift: every expert's load walks at random, by a tenth (or a quarter) over the
50 steps between two plans. Planners see a moving average of the steps before; balance (mean over fullest
rank) is measured on the steps AFTER the plan, with the split that training runs. Greedy stands for what
others do: a fresh table for each plan, shown with its own equal shares and with our split. Times are
processor time of one thread.

Parts: `quality` (this). `end_to_end`: step times of real training on the shaped network, which needs root and
is left out where that is missing (bench/_placement_steps.py). `memory`: a segment-recurrent model, static,
random and planned (bench/_placement_memory.py). `fedavg`: how far averaging the weights of replicas is from
summing their gradients (bench/_placement_fedavg.py). `owners`: what it is worth that replicas own their
expert together, on 64 simulated ranks (bench/_placement_owners.py). `replay`: planners on the recorded loads
of two real runs (bench/_placement_replay.py). `nodes`: two hosts with a slow link between them, predictions
against measurements; it needs root, too (bench/_placement_nodes.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import _placement_fedavg
import _placement_memory
import _placement_nodes
import _placement_owners
import _placement_replay
import _placement_steps
import numpy as np
from shaped_network import why_not

from moeclipse.balance.load import LoadAverage
from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.split import ReplicaTable, balance_of, split_rows

T = TypeVar("T")
Found = tuple[list[dict[str, Any]], dict[str, float]]

ROWS_PER_RANK = 32768
EVERY = 50
SEEN = 20  # steps before a plan that the average is fed with
MEASURED = 5  # steps behind a plan that balance is measured on
LATER_PLANS = 4
PLAN_REPEATS, SPLIT_REPEATS = 3, 9  # the best of so many counts
MICROBATCHES = 8  # of a step; counts are those of one
COSTS = PlacementCosts.from_shapes(d_model=2048, d_ff=1408, every=EVERY)
COSTS = replace(COSTS, row_seconds=MICROBATCHES * COSTS.row_seconds, row_bytes=MICROBATCHES * COSTS.row_bytes)
SHAPES = ((256, 64, 5), (256, 32, 10), (64, 8, 10))
METHODS = ("static", "greedy even", "greedy", "wrap_fill", "incremental")


class Loads:
    """A gate that drifts: Zipf frequencies in random order, each on its own random walk."""

    def __init__(self, num_experts: int, num_ranks: int, exponent: float, drift: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.weight_E = self.rng.permutation(np.arange(1, num_experts + 1) ** -exponent)
        self.num_ranks = num_ranks
        self.per_step = drift / np.sqrt(EVERY)

    def step(self) -> np.ndarray:
        """Counts [P, E] of the next step."""
        self.weight_E = self.weight_E * np.exp(self.rng.normal(0, self.per_step, len(self.weight_E)))
        part_E = self.weight_E / self.weight_E.sum()
        return self.rng.multinomial(ROWS_PER_RANK, part_E, size=self.num_ranks)

    def skip(self, steps: int) -> None:
        noise = self.rng.normal(0, self.per_step * np.sqrt(steps), len(self.weight_E))
        self.weight_E = self.weight_E * np.exp(noise)


def best_of(repeats: int, decide: Callable[[], T]) -> tuple[float, T]:
    """The least processor time of a pure decision: other work on the machine can only add to it."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        answer = decide()
        times.append(time.thread_time() - begin)
    return min(times), answer


def balance(placement: Placement, table: ReplicaTable, counts_PE: np.ndarray, even: bool) -> float:
    """Mean over fullest rank, with our split or with equal shares for all replicas."""
    if not even:
        return split_rows(counts_PE, table).balance
    share_EP = placement.holds_EP / placement.holds_EP.sum(1, keepdims=True)
    return balance_of(counts_PE.sum(0) @ share_EP)


def one_run(
    method: str, shape: tuple[int, int, int], exponent: float, drift: float, seed: int
) -> dict[str, Any]:
    num_experts, num_ranks, slots = shape
    loads = Loads(num_experts, num_ranks, exponent, drift, seed)
    current = Placement.contiguous(num_experts, num_ranks)
    average = LoadAverage(decay=0.8)
    found: dict[str, list[float]] = {"after": [], "before": [], "moved": [], "plan_ms": []}
    for _ in range(1 + LATER_PLANS):
        for _ in range(SEEN):
            average = average.add(loads.step()[None])
        counts_PE = average.rows_LPE[0]
        before = current
        if method != "static":
            config = PlanConfig(planner=method.split()[0])
            seconds, current = best_of(
                PLAN_REPEATS, partial(plan, config, counts_PE, (slots,) * num_ranks, current, COSTS)
            )
            found["plan_ms"].append(1e3 * seconds)
        found["moved"].append(sum(move.weights for move in before.moves(current)) / (slots * num_ranks))
        table = ReplicaTable.of(current, counts_PE.sum(0))
        even = method == "greedy even"
        behind = [balance(current, table, loads.step(), even) for _ in range(MEASURED)]
        found["after"].append(float(np.mean(behind)))
        loads.skip(EVERY - SEEN - MEASURED)
        found["before"].append(balance(current, table, loads.step(), even))
    return {
        "first": found["after"][0],
        "later": float(np.mean(found["after"][1:])),
        "before_next": float(np.mean(found["before"])),
        "moved_later": max(found["moved"][1:]),
        "plan_ms": float(np.median(found["plan_ms"])) if found["plan_ms"] else 0.0,
        "plan_ms_first": found["plan_ms"][0] if found["plan_ms"] else 0.0,
        "placement": current,
        "load_E": average.rows_LPE[0].sum(0),
        "loads": loads,
    }


def split_speed(run: dict[str, Any], repeats: int) -> dict[str, float]:
    """Microseconds of one split, and how close it comes to the linear program (with highspy)."""
    table = ReplicaTable.of(run["placement"], run["load_E"])
    times, close = [], []
    for _ in range(repeats):
        counts_PE = run["loads"].step()
        seconds, split = best_of(SPLIT_REPEATS, partial(split_rows, counts_PE, table))
        times.append(1e6 * seconds)
        lowest = lowest_fullest(counts_PE.sum(0), run["placement"]) if len(close) < 9 else None
        if lowest is not None:
            close.append(lowest / float(split.load_P.max()))
    return {"split_us": float(np.median(times)), "of_lp": float(np.min(close)) if close else float("nan")}


def lowest_fullest(load_E: np.ndarray, placement: Placement) -> float | None:
    """The fullest rank that the best split of all would leave, by linear programming."""
    try:
        import highspy
    except ImportError:
        return None
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    fullest = solver.addVariable(0, highspy.kHighsInf, 1.0)
    ranks: list[list[Any]] = [[] for _ in range(placement.num_ranks)]
    for expert, holders in enumerate(placement.holders):
        parts = [solver.addVariable(0, highspy.kHighsInf, 0.0) for _ in holders]
        solver.addConstr(sum(parts) == float(load_E[expert]))
        for rank, part in zip(holders, parts, strict=True):
            ranks[rank].append(part)
    for parts in ranks:
        if parts:
            solver.addConstr(sum(parts) - fullest <= 0)
    solver.minimize(fullest)
    return float(solver.getInfo().objective_function_value)


def quality(quick: bool) -> Found:
    rows: list[dict[str, Any]] = []
    checks: dict[str, float] = {}
    seeds = range(2 if quick else 5)
    cases = [(shape, 1.2, 0.1) for shape in SHAPES] + (
        [] if quick else [(SHAPES[0], 0.8, 0.1), (SHAPES[0], 1.2, 0.25)]
    )
    print("balance on steps behind a plan (first, later plans), at the end of an interval;")
    print("moved: part of the slots, worst later plan\n")
    print(
        f"{'experts/ranks/slots':<20}{'zipf':>5}{'drift':>6}  {'method':<12}{'first':>7}{'later':>7}"
        f"{'end':>7}{'moved':>7}{'plan ms':>9}{'split us':>9}{'of LP':>7}"
    )
    for shape, exponent, drift in cases:
        for method in METHODS:
            runs = [one_run(method, shape, exponent, drift, seed) for seed in seeds]
            row: dict[str, Any] = {
                "shape": "/".join(map(str, shape)),
                "zipf": exponent,
                "drift": drift,
                "method": method,
            }
            row |= {
                key: float(np.mean([run[key] for run in runs]))
                for key in ("first", "later", "before_next", "plan_ms")
            }
            row["moved_later"] = max(run["moved_later"] for run in runs)
            row["plan_ms_first"] = float(np.median([run["plan_ms_first"] for run in runs]))
            if method != "greedy even":
                speeds = [split_speed(run, 9 if quick else 31) for run in runs]
                row["split_us"] = float(np.median([speed["split_us"] for speed in speeds]))
                row["of_lp"] = float(np.min([speed["of_lp"] for speed in speeds]))
            rows.append(row)
            print(
                f"{row['shape']:<20}{exponent:>5}{drift:>6.0%}  {method:<12}"
                f"{row['first']:>7.3f}{row['later']:>7.3f}"
                f"{row['before_next']:>7.3f}{row['moved_later']:>7.1%}{row['plan_ms']:>9.1f}"
                f"{row.get('split_us', float('nan')):>9.0f}{row.get('of_lp', float('nan')):>7.3f}",
                flush=True,
            )
            if (exponent, drift) == (1.2, 0.1):
                checks |= checks_of(shape, method, row)
    return rows, checks


def checks_of(shape: tuple[int, int, int], method: str, row: dict[str, Any]) -> dict[str, float]:
    if (shape, method) == ((64, 8, 10), "wrap_fill"):
        return {"balance_64_8_10": row["first"]}
    if (shape, method) != ((256, 64, 5), "incremental"):
        return {}
    return {
        "balance_256_64_5": row["first"],
        "balance_256_64_5_later": row["later"],
        "moved_share": row["moved_later"],
        "plan_ms": max(row["plan_ms"], row["plan_ms_first"]),
        "split_us": row["split_us"],
        "split_of_lp": row["of_lp"],
    }


def end_to_end(quick: bool) -> Found:
    reason = why_not()
    if reason is not None:
        print(f"end_to_end left out: {reason}")
        return [], {}
    return _placement_steps.report(_placement_steps.run_here(3 if quick else 9))


def nodes(quick: bool) -> Found:
    reason = why_not()
    if reason is not None:
        print(f"nodes left out: {reason}")
        return [], {}
    return _placement_nodes.report(_placement_nodes.run_here(3 if quick else 9))


def owners(quick: bool) -> Found:
    loads = {}
    for exponent in _placement_owners.ZIPF[:1] if quick else _placement_owners.ZIPF:
        gate = Loads(_placement_owners.NUM_EXPERTS, _placement_owners.NUM_RANKS, exponent, 0.1, 0)
        loads[exponent] = np.mean([gate.step() for _ in range(SEEN)], axis=0), gate.step()
    rows = _placement_owners.run(loads)
    return rows, _placement_owners.checks(rows)


PARTS: dict[str, Callable[[bool], Found]] = {
    "quality": quality,
    "end_to_end": end_to_end,
    "nodes": nodes,
    "owners": owners,
    "replay": lambda quick: _placement_replay.run(2 if quick else 6),
    "memory": lambda quick: _placement_memory.report(_placement_memory.run_here(4 if quick else 60)),
    "fedavg": lambda quick: _placement_fedavg.report(_placement_fedavg.run_here(4 if quick else 40)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows, checks and machine here")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and cases")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    checks: dict[str, float] = {}
    for name, part in PARTS.items():
        if options.part in (name, "all"):
            print(f"\n== {name}")
            more, found = part(options.quick)
            rows += more
            checks |= found
    if options.part in ("end_to_end", "nodes") and not rows:
        return 2
    print("\n".join(f"{name:<28} {value:.4g}" for name, value in checks.items()))
    if options.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        }
        options.json.write_text(json.dumps({"rows": rows, "checks": checks, "machine": machine}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
