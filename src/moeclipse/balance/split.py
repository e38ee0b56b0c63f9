"""Tokens over replicas, anew each step: which rows of which source rank go to which replica.

Idea: first quotas, then rows. Quotas pour each expert's load over its ranks like water, so that the fullest
rank is as low as the placement allows: start from the shares that suit the loads of the plan, then let one
expert after the other find its level. Rows then go to the replica on their own rank, but only up to its
quota (a rank that kept all of its own rows would overflow while others idle), next to a replica on their
own node, the rest in order of rank.

Contract: a pure function of the count matrix that the size round exchanged and of the placement, so every
rank computes the same answer; only exact integers and IEEE additions, divisions and comparisons in a fixed
order take part, so hosts with different processors agree too. Every row is given exactly one replica.

    table = ReplicaTable.of(placement, load_E)   once per placement; load_E: what it was planned for
    split = split_rows(counts_PE, table)         each step
    split.rows_PR[p, j]                          rows of source rank p for the replica in slot j

Slots are counted rank by rank, as in `Placement.slot_of`; an empty slot is a column of zeros.

Shapes: P ranks, E experts, R slots, X slots of experts with several replicas.

A rank fills the replicas of each expert with its rows in an order that is computed once for a placement: its
own one first (`QuotaOrder`). What changes from step to step are the quotas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.core.errors import ConfigError

VISITS = 300
"""Visits of replicas that a step can afford: small layers are swept often, large ones twice at least."""
MANY_SWEEPS = 5
LEVEL = 0.004
"""In large layers, swept less often than that, ranks that differ by this part of the mean count as level."""
NEAR_FULLEST = 0.4
EXPECTED_SWEEPS = 100
BEYOND = 1.3
"""Over-relaxation: with 1 (no further than level) chains of ranks take twice as many sweeps."""
GOOD_ENOUGH = 1.001
"""Sweeps end when the fullest rank is this close to the mean load."""
WORTH_A_SWEEP = 0.9995
"""Sweeps end when one lowers the fullest rank by less than this factor."""


@dataclass(frozen=True, kw_only=True)
class ReplicaTable:
    """What the split needs to know of a placement, computed once."""

    num_ranks: int
    num_experts: int
    expert_R: np.ndarray
    """Expert of each slot; empty slots point to expert 0 and are listed in `empty`."""
    rank_R: np.ndarray
    empty: np.ndarray
    single_E: np.ndarray
    """Experts with one replica, and their ranks: nothing to decide there."""
    single_rank_E: np.ndarray
    several: tuple[int, ...]
    """Experts with several replicas."""
    ranks_of: tuple[tuple[int, ...], ...]
    """Their ranks, ascending."""
    slot_X: np.ndarray
    """Their slots, expert by expert, ascending by rank."""
    place_X: np.ndarray
    """For each of these slots, its expert's place in `several`."""
    first_X: np.ndarray
    """For each of these slots, the first slot of the same expert (a place in X)."""
    share_X: np.ndarray
    """Shares to start from, of each expert's load."""

    @classmethod
    def of(cls, placement: Placement, expected_E: np.ndarray | None = None) -> ReplicaTable:
        """With the loads that the placement was made for, steps start from the shares that suit them.

        All ranks must give the same loads, or none.
        """
        flat = [expert for row in placement.slots for expert in row]
        rank_R = [rank for rank, row in enumerate(placement.slots) for _ in row]
        slot_of = {(rank, expert): j for j, (rank, expert) in enumerate(zip(rank_R, flat, strict=True))}
        several = [e for e, ranks in enumerate(placement.holders) if len(ranks) > 1]
        single = [e for e, ranks in enumerate(placement.holders) if len(ranks) == 1]
        ranks_of = [placement.holders[e] for e in several]
        sizes = [len(ranks) for ranks in ranks_of]
        starts = np.cumsum([0, *sizes])[:-1]
        table = cls(
            num_ranks=placement.num_ranks,
            num_experts=placement.num_experts,
            expert_R=_ints([max(expert, 0) for expert in flat]),
            rank_R=_ints(rank_R),
            empty=_ints([j for j, expert in enumerate(flat) if expert == EMPTY]),
            single_E=_ints(single),
            single_rank_E=_ints([placement.holders[e][0] for e in single]),
            several=tuple(several),
            ranks_of=tuple(ranks_of),
            slot_X=_ints([slot_of[r, e] for e, ranks in zip(several, ranks_of, strict=True) for r in ranks]),
            place_X=np.repeat(np.arange(len(several)), sizes),
            first_X=np.repeat(starts, sizes),
            share_X=np.repeat([1 / size for size in sizes], sizes),
        )
        if expected_E is None or not several:
            return table
        shares, _ = pour(expected_E, table, EXPECTED_SWEEPS, good_enough=1.0, worth_a_sweep=0.9999)
        total_X = np.repeat(expected_E[several], sizes)
        flat_X = np.array([y for mine in shares for y in mine])
        share_X = np.where(total_X > 0, flat_X / np.where(total_X > 0, total_X, 1), table.share_X)
        return replace(table, share_X=share_X)

    @cached_property
    def expert_of_several(self) -> np.ndarray:
        return _ints(self.several)

    @cached_property
    def rank_X(self) -> np.ndarray:  # noqa: N802
        return self.rank_R[self.slot_X]


@dataclass(frozen=True, kw_only=True)
class Split:
    table: ReplicaTable
    rows_PR: np.ndarray
    """Rows of each source rank for the replica in each slot."""

    @cached_property
    def load_P(self) -> np.ndarray:  # noqa: N802
        """Rows that each rank computes."""
        return np.bincount(self.table.rank_R, self.rows_PR.sum(0), self.table.num_ranks).astype(np.int64)

    @cached_property
    def balance(self) -> float:
        """Mean over fullest rank: 1 is perfect."""
        return balance_of(self.load_P)

    @cached_property
    def sent_PP(self) -> np.ndarray:  # noqa: N802
        """Rows from each source rank to each rank that computes them; the diagonal stays on its rank."""
        sent = np.zeros((self.table.num_ranks, self.table.num_ranks), dtype=np.int64)
        np.add.at(sent.T, self.table.rank_R, self.rows_PR.T)
        return sent


def balance_of(load_P: np.ndarray) -> float:
    fullest = float(load_P.max())
    return float(load_P.mean()) / fullest if fullest > 0 else 1.0


def split_rows(counts_PE: np.ndarray, table: ReplicaTable, node_P: Sequence[int] | None = None) -> Split:
    """Split the rows of one step. `node_P` names the node of each rank where there are several."""
    if counts_PE.shape != (table.num_ranks, table.num_experts):
        raise ConfigError(
            f"counts are {list(counts_PE.shape)}, but the placement has {table.num_ranks} ranks and "
            f"{table.num_experts} experts: expected [{table.num_ranks}, {table.num_experts}]"
        )
    counts_PE = counts_PE.astype(np.int64, copy=False)
    rows_PR = counts_PE.take(table.expert_R, 1)
    if len(table.empty):
        rows_PR[:, table.empty] = 0
    if table.several:
        quota_X = whole_quotas(counts_PE.sum(0), table)
        rows_PR[:, table.slot_X] = _rows_for_quotas(counts_PE, quota_X, table, node_P)
    return Split(table=table, rows_PR=rows_PR)


def whole_quotas(load_E: np.ndarray, table: ReplicaTable) -> np.ndarray:
    """Rows for each replica of the experts that have several, in the order of `slot_X`."""
    shares, _ = pour(load_E, table)
    # Rounding the running sum keeps every expert's total exact.
    bounds = np.rint(np.cumsum([y for mine in shares for y in mine]))
    quota = np.diff(bounds, prepend=0.0)
    return quota.astype(np.int64)


def pour(
    load_E: np.ndarray,
    table: ReplicaTable,
    max_sweeps: int | None = None,
    *,
    good_enough: float = GOOD_ENOUGH,
    worth_a_sweep: float = WORTH_A_SWEEP,
) -> tuple[list[list[float]], list[float]]:
    """(rows for each replica of the experts with several, level of each rank), as fractions of rows."""
    level_P = np.bincount(table.single_rank_E, load_E[table.single_E], table.num_ranks)
    if not table.several:
        return [], level_P.tolist()
    several_load = load_E[table.expert_of_several]
    start_X = several_load[table.place_X] * table.share_X
    level = (level_P + np.bincount(table.rank_X, start_X, table.num_ranks)).tolist()
    start = start_X.tolist()
    shares, begin = [], 0
    for ranks in table.ranks_of:
        shares.append(start[begin : begin + len(ranks)])
        begin += len(ranks)
    # Heavy experts first: they shape the levels that light ones then even out.
    order = np.argsort(-several_load, kind="stable").tolist()
    loads = several_load.tolist()
    jobs = [(i, table.ranks_of[i], float(loads[i])) for i in order if loads[i] > 0]
    mean = sum(level) / len(level)
    sweeps = max_sweeps or max(VISITS // len(start), 2)
    large = max_sweeps is None and sweeps < MANY_SWEEPS
    floor, close = good_enough * mean, mean * (LEVEL if large else good_enough - 1)
    fullest = max(level)
    for turn in range(sweeps):
        if fullest <= floor:
            break
        # Only the fullest ranks set the pace: where none is near, nothing is won.
        sweep(jobs, level, shares, close, mean + NEAR_FULLEST * (fullest - mean) if large else 0.0)
        before, fullest = fullest, max(level)
        if turn > 0 and fullest > worth_a_sweep * before:
            break
    return shares, level


def sweep(
    jobs: list[tuple[int, tuple[int, ...], float]],
    level: list[float],
    shares: list[list[float]],
    close: float = 0.0,
    low: float = 0.0,
) -> None:
    """Let each expert in turn find its level above what the others put on its ranks, and go a little further.

    Experts whose ranks differ by no more than `close`, or are all below `low`, are left as they are.

    Plain lists: with a handful of replicas each, they are several times faster than array calls.
    """
    for i, ranks, load in jobs:
        mine = shares[i]
        if len(ranks) == 2:
            a, b = ranks
            if -close < level[a] - level[b] < close or (level[a] < low and level[b] < low):
                continue
            rest_a, rest_b = level[a] - mine[0], level[b] - mine[1]
            y = mine[0] + BEYOND * ((load + rest_b - rest_a) * 0.5 - mine[0])
            y = 0.0 if y < 0.0 else min(y, load)
            level[a], level[b] = rest_a + y, rest_b + (load - y)
            mine[0], mine[1] = y, load - y
            continue
        heights = [level[rank] for rank in ranks]
        highest = max(heights)
        if highest < low or highest - min(heights) < close:
            continue
        rest = [height - y for height, y in zip(heights, mine, strict=True)]
        water = (load + sum(rest)) / len(rest)
        if water < max(rest):
            # Some ranks are above the water already: pour over the lowest ones alone.
            total, wet = load, 0
            for height in sorted(rest):
                if height * wet >= total:
                    break
                total += height
                wet += 1
            water = total / wet
            filled = [water - height if water > height else 0.0 for height in rest]
        else:
            filled = [y + BEYOND * (water - height - y) for height, y in zip(rest, mine, strict=True)]
            if min(filled) < 0.0:
                filled = [water - height for height in rest]
        shares[i] = filled
        for rank, height, y in zip(ranks, rest, filled, strict=True):
            level[rank] = height + y


def _rows_for_quotas(
    counts_PE: np.ndarray, quota_X: np.ndarray, table: ReplicaTable, node_P: Sequence[int] | None
) -> np.ndarray:
    """Rows [P, X]: own rank first, then own node, then in order, each up to the quotas."""
    left_PS = counts_PE.take(table.expert_of_several, 1)
    local_X = np.minimum(quota_X, left_PS[table.rank_X, table.place_X])
    left_PS[table.rank_X, table.place_X] -= local_X
    quota_X = quota_X - local_X
    near = None
    if node_P is not None and len(set(node_P)) > 1:
        near = _rows_inside_nodes(left_PS, quota_X, table, np.asarray(node_P))
        quota_X = quota_X - near.sum(0)
        left_PS = left_PS - _sum_by_expert(near, table)
    rows_PX = _overlap(left_PS, quota_X, table)
    rows_PX[table.rank_X, np.arange(len(quota_X))] += local_X
    return rows_PX if near is None else rows_PX + near


def _overlap(left_PS: np.ndarray, quota_X: np.ndarray, table: ReplicaTable) -> np.ndarray:
    """Sources in order of rank fill replicas in order of rank: where two running sums overlap."""
    upper_X = quota_X.cumsum()
    lower_X = upper_X - quota_X
    start_X = lower_X[table.first_X]
    reach = np.empty((left_PS.shape[0] + 1, left_PS.shape[1]), dtype=np.int64)
    reach[0] = 0
    left_PS.cumsum(0, out=reach[1:])
    reach_X = reach.take(table.place_X, 1)
    np.maximum(reach_X, lower_X - start_X, out=reach_X)
    np.minimum(reach_X, upper_X - start_X, out=reach_X)
    return reach_X[1:] - reach_X[:-1]


def _rows_inside_nodes(
    left_PS: np.ndarray, quota_X: np.ndarray, table: ReplicaTable, node_P: np.ndarray
) -> np.ndarray:
    """The part of the rows [P, X] that finds a replica on its own node."""
    rows_PX = np.zeros((len(node_P), len(quota_X)), dtype=np.int64)
    node_X = node_P[table.rank_X]
    for node in sorted(set(node_P.tolist())):
        quota_in_X = np.where(node_X == node, quota_X, 0)
        ranks = np.flatnonzero(node_P == node)
        rows_PX[ranks] = _overlap(left_PS[ranks], quota_in_X, table)
    return rows_PX


def _sum_by_expert(rows_PX: np.ndarray, table: ReplicaTable) -> np.ndarray:
    return np.add.reduceat(rows_PX, np.unique(table.first_X), axis=1)


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@dataclass(frozen=True)
class QuotaOrder:
    """The slots that hold experts, expert by expert; those of expert e begin at first_E[e]."""

    slots_R: np.ndarray
    first_E: np.ndarray

    @classmethod
    def of(cls, placement: Placement, me: int) -> QuotaOrder:
        places: list[list[tuple[bool, int]]] = [[] for _ in range(placement.num_experts)]
        slot = 0
        for rank, row in enumerate(placement.slots):
            for expert in row:
                if expert >= 0:
                    places[expert].append((rank != me, slot))
                slot += 1
        slots = [slot for found in places for _, slot in sorted(found)]
        first = np.cumsum([0, *map(len, places)])
        return cls(np.array(slots, dtype=np.int64), first)
