"""Placement: how even the ranks are, how little moves, and how long deciding takes.

    .venv/bin/python bench/placement.py [--json FILE]              all parts in short, some minutes
    .venv/bin/python bench/placement.py --part NAME [--short]      one of them, in full or in short
    .venv/bin/python bench/placement.py --long                     all in full
    .venv/bin/python bench/placement.py --smoke                    all in sizes that measure nothing

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
of two real runs (bench/_placement_replay.py). `far`: planners on 64 simulated ranks of 8 nodes
(bench/_placement_far.py). `nodes`: two hosts with a slow link between them, predictions against
measurements; it needs root, too (bench/_placement_nodes.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import _placement_far
import _placement_fedavg
import _placement_memory
import _placement_nodes
import _placement_owners
import _placement_replay
import _placement_steps
import numpy as np
from _smoke import BenchParser, machine, write
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
Size = Literal["smoke", "short", "long"]


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
    method: str,
    shape: tuple[int, int, int],
    exponent: float,
    drift: float,
    seed: int,
    later: int = LATER_PLANS,
) -> dict[str, Any]:
    num_experts, num_ranks, slots = shape
    loads = Loads(num_experts, num_ranks, exponent, drift, seed)
    current = Placement.contiguous(num_experts, num_ranks)
    average = LoadAverage(decay=0.8)
    found: dict[str, list[float]] = {"after": [], "before": [], "moved": [], "plan_ms": []}
    for _ in range(1 + later):
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


def quality(size: Size) -> Found:
    rows: list[dict[str, Any]] = []
    checks: dict[str, float] = {}
    seeds = range({"smoke": 1, "short": 2, "long": 5}[size])
    cases = [(shape, 1.2, 0.1) for shape in (SHAPES[-1:] if size == "smoke" else SHAPES)]
    cases += [(SHAPES[0], 0.8, 0.1), (SHAPES[0], 1.2, 0.25)] if size == "long" else []
    print("balance on steps behind a plan (first, later plans), at the end of an interval;")
    print("moved: part of the slots, worst later plan\n")
    print(
        f"{'experts/ranks/slots':<20}{'zipf':>5}{'drift':>6}  {'method':<12}{'first':>7}{'later':>7}"
        f"{'end':>7}{'moved':>7}{'plan ms':>9}{'split us':>9}{'of LP':>7}"
    )
    for shape, exponent, drift in cases:
        for method in METHODS:
            later = 1 if size == "smoke" else LATER_PLANS
            runs = [one_run(method, shape, exponent, drift, seed, later) for seed in seeds]
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
                repeats = {"smoke": 1, "short": 9, "long": 31}[size]
                speeds = [split_speed(run, repeats) for run in runs]
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


def on_slow_wire(part: Any, size: Size) -> Found:
    """Of a part that needs a shaped network; nothing where there is none."""
    reason = why_not()
    if reason is not None:
        print(f"left out: {reason}")
        return [], {}
    found: Found = part.report(part.run_here(size))
    return found


def owners(size: Size) -> Found:
    loads = {}
    for exponent in _placement_owners.ZIPF if size == "long" else _placement_owners.ZIPF[:1]:
        gate = Loads(_placement_owners.NUM_EXPERTS, _placement_owners.NUM_RANKS, exponent, 0.1, 0)
        loads[exponent] = np.mean([gate.step() for _ in range(SEEN)], axis=0), gate.step()
    rows = _placement_owners.run(loads, _placement_owners.NODES[-1 if size == "smoke" else 0 :])
    return rows, _placement_owners.checks(rows)


def far(size: Size) -> Found:
    seeds, cases, plans = {"smoke": (1, 1, 2), "short": (1, 2, 3), "long": (3, 4, 4)}[size]
    rows = _placement_far.run(Loads, COSTS, seeds, cases, plans)
    return rows, _placement_far.checks(rows)


PARTS: dict[str, Callable[[Size], Found]] = {
    "quality": quality,
    "end_to_end": partial(on_slow_wire, _placement_steps),
    "nodes": partial(on_slow_wire, _placement_nodes),
    "owners": owners,
    "far": far,
    "replay": _placement_replay.run,
    "memory": lambda size: _placement_memory.report(_placement_memory.run_here(size)),
    "fedavg": lambda size: _placement_fedavg.report(_placement_fedavg.run_here(size)),
}
NEED_ROOT = ("end_to_end", "nodes")


def main() -> int:
    parser = BenchParser(__doc__, smoke={})
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help="alone, and in full")
    parser.add_argument("--short", action="store_true", help="of a part: fewer seeds, cases and steps")
    parser.add_argument("--long", action="store_true", help="all parts in full")
    options = parser.parse_args()
    full = options.long or (options.part != "all" and not options.short)
    size: Size = "smoke" if options.smoke else "long" if full else "short"
    rows: list[dict[str, Any]] = []
    checks: dict[str, float] = {}
    for name, part in PARTS.items():
        if options.part in (name, "all"):
            print(f"\n== {name}", flush=True)
            begun = time.monotonic()
            more, found = part(size)
            rows += [{"part": name, **row} for row in more]
            checks |= found
            print(f"-- {name}: {time.monotonic() - begun:.0f} s", flush=True)
    if options.part in NEED_ROOT and not rows:
        return 2
    print("\n".join(f"{name:<28} {value:.4g}" for name, value in checks.items()))
    about = {**machine(), "numpy": np.__version__, "size": size}
    write(options.json, {"rows": rows, "checks": checks, "machine": about})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
