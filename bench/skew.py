"""What uneven gates cost, and what helps: eight workloads, simulated for many ranks.

    .venv/bin/python bench/skew.py [--ranks 64] [--nodes 1] [--experts 128] [--slots 3] [--steps 120]
    .venv/bin/python bench/skew.py --cables             four ranks of bench/skew_steps.py, 44 steps
    .venv/bin/python bench/skew.py --smoke

A layer of Qwen3-30B-A3B's shape on H200s that share one NVLink domain, or `--nodes` of them. Each step's rows
are those of a workload (`balance/workloads`), counted for some tokens and taken for `--calls` times as many.
The table has the seconds of a gate that is forced to be even, for the same tokens on the same ranks, over
those of each cure (`balance/cures`, which says what they are and how they are priced). `later` is the second
half of the steps: first plans are made in the first. `static` has one slot for each of its experts; the other
cures fill up to `--slots`.

With `--cables` prices are those that four ranks with a cable of 60 mbit each have measured, and a step has
REST_S beside the layer: what those ranks should see, without their clock.

Training on ranks that really run: bench/skew_steps.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from _smoke import BenchParser, machine, write

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.cures import CURES, Bed, replay
from moeclipse.balance.objective import PlacementCosts, nodes_of
from moeclipse.balance.workloads import STEADY, WORKLOADS, SharedLayer, counts

D_MODEL, D_FF = 2048, 768
CABLES = {
    "ranks": 4,
    "nodes": 4,
    "experts": 16,
    "top_k": 2,
    "slots": 6,
    "tokens": 256,
    "steps": 44,
    "calls": 1,
}
ON_CABLES = PlacementCosts(
    row_seconds=1.3e-5,
    row_bytes=384.0,
    weight_bytes=98304.0,
    gradient_bytes=98304.0,
    state_bytes=294912.0,
    near_bandwidth=7.4e6,
    far_bandwidth=7.4e6,
    card_per_rank=True,
    loan_seconds=1.5e-3,
    replicas_seconds=7e-3,
    copy_bandwidth=8.7e6,
)
LOOK_S, REST_S = 6e-3, 0.1
"""Seconds of asking for shadows, and of a step beside its layer."""


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
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--cables", action="store_true", help="four ranks with a slow cable each")
    given = parser.parse_args()
    if given.cables:
        vars(given).update(CABLES)
    shape = SharedLayer(
        num_experts=given.experts, top_k=given.top_k, num_ranks=given.ranks, tokens=given.tokens
    )
    print(f"{'workload':16}{'rows of the fullest':>20}" + "".join(f"{way:>10}{'later':>8}" for way in CURES))
    rows = []
    for workload in given.workloads:
        row = measure(workload, shape, given)
        rows.append(row)
        told = "".join(f"{row[way]:10.3f}{row[f'{way} later']:8.3f}" for way in CURES)
        print(f"{workload:16}{row['fullest']:20.2f}{told}", flush=True)
    steady = [row for row in rows if row["workload"] in STEADY]
    changing = [row for row in rows if row not in steady]
    checks = {
        "worst_steady_later": min((row["auto later"] for row in steady), default=1.0),
        "worst_changing": min((row["auto"] for row in changing), default=1.0),
        "worst_changing_later": min((row["auto later"] for row in changing), default=1.0),
        "worst_over_static": min(row["auto"] / row["static"] for row in rows),
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
    node_P = nodes_of(shape.num_ranks, given.nodes)
    bed = Bed(costs=costs_for(given.calls, config), slots=given.slots, node_P=node_P, config=config)
    if given.cables:
        config = replace(config, start_step=4)
        bed = replace(bed, costs=ON_CABLES, config=config, look=LOOK_S, least_s=0.01 * 2 * REST_S)
    found = replay((counts(workload, given.seed, step, shape) for step in range(given.steps)), bed)
    if given.cables:
        found.seconds = {way: [each + REST_S for each in seconds] for way, seconds in found.seconds.items()}
    row: dict[str, Any] = {
        "workload": workload,
        "fullest": float(np.mean(1 / np.array(found.balance["static"]))),
    }
    for way in CURES:
        row |= {way: found.throughput(way), f"{way} later": found.throughput(way, given.steps // 2)}
    # The first plan is made of an empty table.
    return row | {"plan_s": max(found.plan_s), "copies": float(np.mean(found.copies[1:] or [0]))}


if __name__ == "__main__":
    raise SystemExit(main())
