"""Who owns a hot expert: its primary alone, or all of its replicas together; 256 experts on 64 ranks.

    .venv/bin/python bench/placement.py --part owners

With one owner the primary of an expert with r replicas receives r - 1 copies of its gradients; together each
replica sends and receives (r - 1) / r of one. For both prices the incremental planner makes a plan from the
steps before, and a step that it has not seen is priced (`balance/objective`): one layer, H200s, 8 a node,
NVLink inside and InfiniBand between nodes. A small batch is one microbatch a step, a large one eight: their
rows are paid for more often, gradients and weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moeclipse.balance.objective import PlacementCosts, nodes_of, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan

NUM_EXPERTS, NUM_RANKS, SLOTS = 256, 64, 5
MICROBATCHES = (1, 8)
NODES = (1, 8)
ZIPF = (0.8, 1.2)
WAYS = ("static", "one owner", "shared")


def judged(seen_PE: np.ndarray, next_PE: np.ndarray, nodes: int, microbatches: int) -> list[dict[str, Any]]:
    costs = PlacementCosts.from_shapes(d_model=2048, d_ff=1408)
    costs = replace(
        costs, row_seconds=microbatches * costs.row_seconds, row_bytes=microbatches * costs.row_bytes
    )
    current, node_P = Placement.contiguous(NUM_EXPERTS, NUM_RANKS), nodes_of(NUM_RANKS, nodes)
    found = []
    for way in WAYS:
        priced = replace(costs, shared_owners=way != "one owner")
        table = current
        if way != "static":
            table = plan(PlanConfig(), seen_PE, (SLOTS,) * NUM_RANKS, current, priced, node_P)
        seconds = score(table, next_PE, priced, current=current, node_P=node_P, expected_E=seen_PE.sum(0))
        found.append(
            {
                "way": way,
                "nodes": nodes,
                "microbatches": microbatches,
                "balance": seconds.balance,
                "ms": 1e3 * seconds.total,
                "sync_ms": 1e3 * seconds.sync,
                "replicas": table.num_replicas,
            }
        )
    return found


def run(
    loads: dict[float, tuple[np.ndarray, np.ndarray]], numbers: Sequence[int] = NODES
) -> list[dict[str, Any]]:
    """`loads`: by exponent of Zipf's law, the mean of the steps before and the step after; `numbers`: of
    nodes."""
    print(
        f"{'nodes':>5}{'zipf':>6}{'microbatches':>14}  {'way':<10}"
        f"{'balance':>8}{'ms':>8}{'sync':>7}{'replicas':>10}"
    )
    rows = []
    for nodes in numbers:
        for zipf, (seen_PE, next_PE) in loads.items():
            for microbatches in MICROBATCHES:
                for row in judged(seen_PE, next_PE, nodes, microbatches):
                    rows.append({**row, "zipf": zipf})
                    print(
                        f"{nodes:>5}{zipf:>6}{microbatches:>14}  {row['way']:<10}{row['balance']:>8.3f}"
                        f"{row['ms']:>8.1f}{row['sync_ms']:>7.2f}{row['replicas']:>10}",
                        flush=True,
                    )
    return rows


def checks(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of eight nodes and a small batch, where one owner costs most."""
    found = {}
    for row in rows:
        if (row["nodes"], row["microbatches"], row["zipf"]) == (8, 1, 0.8) and row["way"] != "static":
            name = row["way"].replace(" ", "_")
            found |= {f"owners_{name}_balance": row["balance"], f"owners_{name}_ms": row["ms"]}
    return found
