"""Shadows that serve other ranks: a hot expert's rows spill over to ranks with little to do, within a step.

Idea. A shadow that computes its own rank's rows alone must stand on nearly every rank to make a hot expert's
owner even, and the owner sends all of these copies. A few copies are enough where a rank that has one takes
rows of others, too: it is a replica for one step. Whom to lend to follows from the counts at hand: what each
rank has above a level is poured into what others have below it, the largest excess into the largest room, one
copy for each pair of them; rows are then split over all holders as over any replicas (`balance/split`), so no
rank has to be told quotas. Some levels are tried, because fewer copies cost less and leave ranks less even.

    plan = choose_serving(counts_PE, placement, costs)
    plan.shadows       as of `balance/shadow`, with plan.serving
    with_guests(...)   the placement of that step

Contract. Pure, a function of what all ranks know, as `choose_shadows`, in whose seconds its plans are told:
what comes out can be compared. An expert is lent by its primary; nobody gets one that it holds.

Shapes: P ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import ShadowPlan, Shadows
from moeclipse.balance.shadow_model import Latency, ShadowCosts, Work, latency
from moeclipse.balance.split import ReplicaTable, Split, split_rows

LEVELS = (1.0, 1.05, 1.15, 1.3, 1.6, 2.0)
"""In mean loads: above it a rank hands rows over, below it one takes them."""
HALVES = 2
"""An excess is worth a copy while moving it wins so many times what the copy costs its ranks."""


def with_guests(placement: Placement, shadows: Shadows) -> Placement:
    """What stands where while these serve: behind the slots of each rank."""
    more: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    for expert, ranks in shadows:
        for rank in ranks:
            more[rank].append(expert)
    rows = tuple((*row, *extra) for row, extra in zip(placement.slots, more, strict=True))
    return Placement(rows, placement.primary)


def choose_serving(
    counts_PE: np.ndarray,
    placement: Placement,
    costs: ShadowCosts,
    *,
    node_P: Sequence[int] | None = None,
    table: ReplicaTable | None = None,
) -> ShadowPlan:
    """The shadows of one step that serve others; none where that does not pay."""
    split = split_rows(counts_PE, table or ReplicaTable.of(placement), node_P)
    before = best = time_of(split, placement, (), costs, node_P)
    chosen: Shadows = ()
    tried: set[Shadows] = {()}
    for level in LEVELS:
        shadows = spilled(split, placement, costs, level)
        if shadows in tried:
            continue
        tried.add(shadows)
        guests = with_guests(placement, shadows)
        after = time_of(
            split_rows(counts_PE, ReplicaTable.of(guests), node_P), placement, shadows, costs, node_P
        )
        if after.total < best.total:
            best, chosen = after, shadows
    if not chosen or before.total - best.total < costs.worthwhile(before):
        return ShadowPlan(shadows=(), before=before, after=before)
    return ShadowPlan(shadows=chosen, before=before, after=best, serving=True)


def spilled(split: Split, placement: Placement, costs: ShadowCosts, level: float) -> Shadows:
    """Who lends what to whom, so that no rank is above this level, as far as that pays."""
    load_P = split.load_P.astype(float)
    height = level * float(load_P.mean())
    room_P = height - load_P
    # Of each expert what each rank computes.
    share_PE = np.zeros((placement.num_ranks, placement.num_experts))
    np.add.at(share_PE, (split.table.rank_R, split.table.expert_R), split.rows_PR.sum(0))
    # Nearly all rows of an expert come from elsewhere: on slow wires they are what a rank has too much of.
    row = 4 * costs.row_send + costs.row_forward + costs.row_backward
    copy = costs.parameter_seconds + costs.gradient_seconds
    least = copy / (HALVES * row) if row > 0 else np.inf
    given: dict[int, set[int]] = {}
    for rank in np.argsort(-load_P, kind="stable").tolist():
        excess = -room_P[rank]
        if excess <= 0:
            break
        for expert in np.argsort(-share_PE[rank], kind="stable").tolist():
            if excess < least or share_PE[rank, expert] < least:
                break
            most = float(min(excess, share_PE[rank, expert]))
            excess -= _pour(expert, most, room_P, placement, given, least)
    return tuple((expert, tuple(sorted(given[expert]))) for expert in sorted(given))


def _pour(
    expert: int,
    rows: float,
    room_P: np.ndarray,
    placement: Placement,
    given: dict[int, set[int]],
    least: float,
) -> float:
    """Rows of one expert into the largest rooms; returns how many found one."""
    left = rows
    free_P = ~placement.holds_EP[expert]
    while left >= least:
        # Who has a copy already takes more of it for nothing.
        has = [rank for rank in sorted(given.get(expert, ())) if room_P[rank] > 0]
        open_P = np.where(free_P, room_P, -np.inf)
        rank = has[0] if has else int(open_P.argmax())
        if not has and open_P[rank] < least:
            break
        taken = min(left, float(room_P[rank]))
        given.setdefault(expert, set()).add(rank)
        room_P[rank] -= taken
        left -= taken
    return rows - left


def time_of(
    split: Split,
    placement: Placement,
    shadows: Shadows,
    costs: ShadowCosts,
    node_P: Sequence[int] | None,
) -> Latency:
    """Seconds of the layer when rows go as the split says and these copies travel."""
    nodes = np.asarray(node_P or [0] * placement.num_ranks)
    near_PP = np.where(nodes[:, None] == nodes, 1.0, costs.far)
    travel_PP = split.sent_PP * near_PP
    np.fill_diagonal(travel_PP, 0)
    copies_in, copies_out = np.zeros(placement.num_ranks), np.zeros(placement.num_ranks)
    for expert, ranks in shadows:
        owner = placement.primary[expert]
        for rank in ranks:
            copies_in[rank] += near_PP[owner, rank]
            copies_out[owner] += near_PP[owner, rank]
    work = Work(
        rows=split.load_P.astype(float),
        rows_in=travel_PP.sum(0),
        rows_out=travel_PP.sum(1),
        copies_in=copies_in,
        copies_out=copies_out,
    )
    return latency(work, costs)
