"""Clean tables to start a search from, whatever holds now.

Idea: few replicas are cheap to keep equal, many even the ranks out, and which is better depends on prices. So
tables are made for each tier of slots, from sparse to full: greedy ones, and wrap-filled ones whose ranks may
be fuller than the mean; ranks are then renamed so that little moves.

Contract: pure and deterministic. Every table fits its tier, so a plan for few slots is found again where
there are more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeclipse.balance.nodes import plan_two_level
from moeclipse.balance.objective import sync_copies
from moeclipse.balance.placement import Placement
from moeclipse.balance.problem import PlanProblem, packed
from moeclipse.balance.replicate import plan_wrap_fill, relabelled

STRETCHES = (1.0, 1.3, 2.0)
"""Loads that a wrap-filled rank may have, in means: what is fuller needs fewer replicas."""


def wrap_filled(problem: PlanProblem, slots_P: Sequence[int], spare: bool = True) -> Placement:
    """Over nodes and ranks, ranks renamed."""
    if problem.num_nodes > 1:
        return renamed(plan_two_level(problem.counts_PE, slots_P, problem.node_P), problem)
    if spare:
        return renamed(plan_wrap_fill(problem.load_E, slots_P), problem)
    mean = float(problem.load_E.sum()) / max(sum(count > 0 for count in slots_P), 1)
    best, least = None, np.inf
    for stretch in STRETCHES:
        rows = problem.costs.row_seconds * stretch * mean
        if rows >= least:
            break  # fuller ranks would cost more than all replicas
        table = plan_wrap_fill(problem.load_E, slots_P, False, stretch)
        copies = max(sync_copies(table, problem.costs.shared_owners))
        seconds = rows + problem.costs.sync_seconds(copies, problem.node_P)
        if seconds < least:
            best, least = table, seconds
    assert best is not None
    return renamed(best, problem)


def renamed(table: Placement, problem: PlanProblem) -> Placement:
    """With its rows on those ranks that hold most of them already, and no more slots than before."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, node in enumerate(problem.node_P):
        # Ranks may take each other's rows only if they have as many slots.
        groups.setdefault((node, len(table.slots[rank])), []).append(rank)
    moved = packed(relabelled(table, problem.current, list(groups.values())), list(map(len, table.slots)))
    assert moved is not None
    return moved
