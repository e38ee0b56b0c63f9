"""Planners on 64 ranks of 8 nodes: 256 experts in 5 slots a rank, loads that drift, held-out steps.

    .venv/bin/python bench/placement.py --part far

Each planner plans four times, 50 steps apart, from the average of 20 steps; priced are the three steps behind
each plan (`balance/objective`, moves included), with a card that the ranks of a node share and with one for
each rank. Milliseconds of a layer for eight microbatches, of the first plan and of later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import thread_time
from typing import Any

import numpy as np

from moeclipse.balance.load import LoadAverage
from moeclipse.balance.objective import PlacementCosts, nodes_of
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.problem import PlanProblem

NUM_EXPERTS, NUM_RANKS, SLOTS, NODES = 256, 64, 5, 8
SEEN, AHEAD, EVERY, PLANS = 20, 3, 50, 4
PLANNERS = ("greedy", "wrap_fill", "incremental")
ZIPF_DRIFT = ((0.5, 0.1), (1.0, 0.1), (1.0, 0.25), (1.3, 0.1))
Gate = Callable[[int, int, float, float, int], Any]


def run(
    gate: Gate, costs: PlacementCosts, seeds: int, cases: int, plans: int = PLANS
) -> list[dict[str, Any]]:
    print(
        f"{'card':<8}{'zipf':>5}{'drift':>6}{'seed':>5}  {'planner':<12}"
        f"{'first':>8}{'later':>8}{'balance':>9}{'cross':>7}{'copies':>8}{'plan ms':>9}"
    )
    rows = []
    for card_per_rank in (False, True):
        part = NUM_RANKS // NODES if card_per_rank else 1
        priced = replace(costs, card_per_rank=card_per_rank, far_bandwidth=costs.far_bandwidth / part)
        for zipf, drift in ZIPF_DRIFT[:cases]:
            for seed in range(seeds):
                for row in one_gate(gate, priced, zipf, drift, seed, plans):
                    rows.append(
                        {"card_per_rank": card_per_rank, "zipf": zipf, "drift": drift, "seed": seed, **row}
                    )
                    print(
                        f"{'rank' if card_per_rank else 'node':<8}{zipf:>5}{drift:>6}{seed:>5}"
                        f"  {row['planner']:<12}"
                        f"{row['first']:>8.1f}{row['later']:>8.1f}{row['balance']:>9.3f}{row['cross']:>7.2f}"
                        f"{row['copies']:>8.0f}{row['plan_ms']:>9.0f}",
                        flush=True,
                    )
    return rows


def one_gate(
    gate: Gate, costs: PlacementCosts, zipf: float, drift: float, seed: int, plans: int
) -> list[dict[str, Any]]:
    """All planners see the same steps."""
    loads, average = gate(NUM_EXPERTS, NUM_RANKS, zipf, drift, seed), LoadAverage(decay=0.8)
    slots_P, node_P = (SLOTS,) * NUM_RANKS, nodes_of(NUM_RANKS, NODES)
    current = dict.fromkeys(PLANNERS, Placement.contiguous(NUM_EXPERTS, NUM_RANKS))
    seen: dict[str, list[tuple[float, ...]]] = {planner: [] for planner in PLANNERS}
    for _ in range(plans):
        for _ in range(SEEN):
            average = average.add(loads.step()[None])
        ahead = [loads.step().astype(float) for _ in range(AHEAD)]
        for planner, now in current.items():
            begun = thread_time()
            table = plan(PlanConfig(planner=planner), average.rows_LPE[0], slots_P, now, costs, node_P)
            took = thread_time() - begun

            def asked(counts_PE: np.ndarray, current: Placement) -> PlanProblem:
                return PlanProblem(
                    counts_PE=counts_PE, slots_P=slots_P, current=current, costs=costs, node_P=node_P
                )

            moved = asked(average.rows_LPE[0], now).judge(table)
            steps = [asked(counts_PE, table).judge(table) for counts_PE in ahead]
            seen[planner].append(
                (
                    1e3 * (float(np.mean([step.total for step in steps])) + moved.migration),
                    float(np.mean([step.balance for step in steps])),
                    float(np.mean([step.cross_share for step in steps])),
                    moved.moves,
                    1e3 * took,
                )
            )
            current[planner] = table
        loads.skip(EVERY - SEEN - AHEAD)
    return [
        {
            "planner": planner,
            "first": rows[0][0],
            **dict(
                zip(("later", "balance", "cross", "copies", "plan_ms"), np.mean(rows[1:], 0), strict=True)
            ),
        }
        for planner, rows in seen.items()
    ]


def checks(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What `incremental` takes over `greedy`: the mean, and the worst."""
    greedy, ours = (
        [row["later"] for row in rows if row["planner"] == name] for name in ("greedy", "incremental")
    )
    over = np.array(ours) / np.array(greedy)
    return {"far_over_greedy": float(over.mean()), "far_worst_over_greedy": float(over.max())}
