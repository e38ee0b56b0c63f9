"""What uneven gates cost, and what helps: eight workloads, simulated for many ranks.

    .venv/bin/python bench/skew.py [--ranks 64] [--nodes 1] [--experts 128] [--slots 3] [--steps 160]
    .venv/bin/python bench/skew.py --smoke

A layer of Qwen3-30B-A3B's shape on H200s that share one NVLink domain, or `--nodes` of them. Each step's rows
are those of a workload (`balance/workloads`), counted for some tokens and taken for `--calls` times as many.
Its seconds are those of the planners' own objective (`balance/objective`: the fullest rank, then wires,
gradients of replicas, moves), compute and wires one after the other. The table has the seconds of a gate that
is forced to be even, for the same tokens on the same ranks, over these:

    static      experts in order, nothing moves
    shadows     experts are lent for the step at hand, from its own counts (`balance/shadow`): static, times
                what that leaves by the prices of loans, which over nodes are not quite those of the objective
    planned     replicas by the incremental planner, from the loads before, asked for every ten steps and when
                loads jump, taken two steps later, moves paid for in the step that makes them
    both        planned, and what is hot now is lent beside it: what training does with `auto`

`later` is the second half of the steps: first plans are made in the first. `static` has one slot for each of
its experts; the others may fill `--slots`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from _smoke import BenchParser, machine, write

from moeclipse.balance.config import PlacementConfig, padded
from moeclipse.balance.drift import Drift
from moeclipse.balance.lending import lent
from moeclipse.balance.load import LoadTrace
from moeclipse.balance.objective import PlacementCosts, nodes_of, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.workloads import STEADY, WORKLOADS, SharedLayer, counts, forced_even

WAYS = ("static", "shadows", "planned", "both")
D_MODEL, D_FF = 2048, 768


def main() -> int:
    smallest = {"ranks": 8, "experts": 16, "top_k": 2, "steps": 24, "tokens": 64, "workloads": ["hot rank"]}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3, help="experts that a rank can hold")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank, that are drawn for a step")
    parser.add_argument("--calls", type=int, default=16, help="how many times as many a step has")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    given = parser.parse_args()
    shape = SharedLayer(
        num_experts=given.experts, top_k=given.top_k, num_ranks=given.ranks, tokens=given.tokens
    )
    print(f"{'workload':16}{'rows of the fullest':>20}" + "".join(f"{way:>10}{'later':>8}" for way in WAYS))
    rows = []
    for workload in given.workloads:
        row = measure(workload, shape, given)
        rows.append(row)
        told = "".join(f"{row[way]:10.3f}{row[f'{way} later']:8.3f}" for way in WAYS)
        print(f"{workload:16}{row['fullest']:20.2f}{told}", flush=True)
    steady = [row for row in rows if row["workload"] in STEADY]
    checks = {
        "worst_steady_later": min((row["both later"] for row in steady), default=1.0),
        "worst_changing": min((row["both"] for row in rows if row not in steady), default=1.0),
        "worst_over_static": min(row["both"] / row["static"] for row in rows),
        "plan_s": max(row["plan_s"] for row in rows),
        "copies": max(row["copies"] for row in rows),
    }
    print("  ".join(f"{name} {value:.3f}" for name, value in checks.items()))
    write(given.json, {"rows": rows, "checks": checks, "machine": machine()})
    return 0


def costs_for(calls: int, config: PlacementConfig) -> PlacementCosts:
    found = PlacementCosts.from_shapes(d_model=D_MODEL, d_ff=D_FF, every=config.lifetime, card_per_rank=True)
    return replace(found, row_seconds=calls * found.row_seconds, row_bytes=calls * found.row_bytes)


def measure(workload: str, shape: SharedLayer, given: Any) -> dict[str, Any]:
    config = PlacementConfig(planner="incremental")
    costs, ranks = costs_for(given.calls, config), shape.num_ranks
    node_P = nodes_of(ranks, given.nodes)
    plain = Placement.contiguous(shape.num_experts, ranks)
    least = score(plain, forced_even(workload, shape), costs, node_P=node_P).total
    planned, pending, expected_E = padded(plain, given.slots), None, None
    trace, plan_s, copies = LoadTrace(drift=Drift()), [], []
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    fullest = []
    for step in range(given.steps):
        counts_PE = counts(workload, given.seed, step, shape)
        moves = 0.0
        if pending is not None and step >= pending[0]:
            _, new, expected_E = pending
            paid = score(new, counts_PE, replace(costs, every=1), current=planned, node_P=node_P)
            moves, pending = paid.migration, None
            copies.append(paid.moves)
            planned = new
        static = score(plain, counts_PE, costs, node_P=node_P)
        held = score(planned, counts_PE, costs, node_P=node_P, expected_E=expected_E)
        told: dict[str, Any] = {"calls": 1, "node_P": node_P}
        loans = lent(plain, counts_PE, costs, **told)
        more = lent(planned, counts_PE, costs, expected_E=expected_E, **told)
        fullest.append(static.fullest / (costs.row_seconds * counts_PE.sum() / ranks))
        seconds["static"].append(static.total)
        seconds["shadows"].append(static.total * loans.after.total / loans.before.total)
        seconds["planned"].append(held.total + moves)
        seconds["both"].append(moves + held.total * more.after.total / more.before.total)
        trace.add(step, counts_PE[None])
        if trace.jumped or (config.due(step) and pending is None):
            begun = time.perf_counter()
            asked = PlanConfig(
                planner="incremental", max_moved=config.max_moved, noise=trace.error(config.ahead)
            )
            seen_PE = trace.average.rows_LPE[0]
            found = plan(asked, seen_PE, (given.slots,) * ranks, planned, costs, node_P=node_P)
            plan_s.append(time.perf_counter() - begun)
            pending = (step + 1 + config.delay, found, seen_PE.sum(0))
    half = given.steps // 2
    row: dict[str, Any] = {"workload": workload, "fullest": float(np.mean(fullest))}
    for way, each in seconds.items():
        row |= {way: least / float(np.mean(each)), f"{way} later": least / float(np.mean(each[half:]))}
    return row | {"plan_s": max(plan_s), "copies": float(np.mean(copies[1:] or [0]))}


if __name__ == "__main__":
    raise SystemExit(main())
