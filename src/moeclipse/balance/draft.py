"""A placement in the making: loads poured over slots, its seconds, and changes tried out cheaply.

Idea: planners try hundreds of changes. A try copies little, pours again only the experts that the change
touches, and is judged by the seconds of a step (`balance/objective`) with each maximum over ranks softened
into a power mean, which feels the ranks next to the fullest one as well; only the change that is taken is
poured in full.

    rows        level of the fullest rank
    near        rows that enter or leave the busiest rank: all but those that it keeps for itself
    cross       the same of the busiest card between nodes
    sync        copies of gradients on the rank with most of them
    migration   copies that `problem.current` does not hold, parts of experts that others owned there, on
                the rank with most of them

Loads that may come (`balance/futures`) are poured beside the average ones; `rows` is the mean over all of
them.

Contract: a `Draft` is never changed by `changed`, `trial` or `poured`; they return another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from moeclipse.balance.futures import Pool
from moeclipse.balance.migration import expert_moves
from moeclipse.balance.objective import EXCHANGES, exchanged
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.problem import PlanProblem

POWER = 64
FELT = 0.5
"""Of the largest: what is below adds nothing that a float could hold."""
NOTHING = 1e-6
"""Copies that are none: sums that went up and down again."""
FULL_SWEEPS = 20
TRIAL_SWEEPS = 2


@dataclass(frozen=True, kw_only=True)
class Change:
    """`put` goes into a slot of rank `target`.

    What was there gives way, or goes into another slot (`to_rank`, `to_slot`) and what was *there* gives
    way; if that was `put` itself, two experts have been exchanged. An EMPTY `put` gives a replica up.
    """

    put: int
    target: int
    slot: int
    to_rank: int = EMPTY
    to_slot: int = EMPTY

    @property
    def moves(self) -> int:
        """Copies of parameters that it takes."""
        return (self.put != EMPTY) + (self.to_rank != EMPTY)


class Books:
    """What ranks do under a draft, kept up to date expert by expert."""

    def __init__(self, num_ranks: int) -> None:
        self.kept = [0.0] * num_ranks
        """Rows that each rank computes and that are its own."""
        self.sends = [0.0] * num_ranks
        """Copies of gradients that each rank sends to owners, ..."""
        self.receives = [0.0] * num_ranks
        """... and receives as one."""
        self.owned = [0] * num_ranks
        """Primaries on each rank."""
        self.gets = [0.0] * num_ranks
        """Seconds of a step, in which each rank gets parameters and optimizer state, ..."""
        self.gives = [0.0] * num_ranks
        """... and gives them to others."""
        self.copied = 0.0
        """Copies of parameters that travel."""

    def copy(self) -> Books:
        other = Books(0)
        other.kept, other.owned = list(self.kept), list(self.owned)
        other.sends, other.receives = list(self.sends), list(self.receives)
        other.gets, other.gives, other.copied = list(self.gets), list(self.gives), self.copied
        return other

    def enter(self, expert: int, draft: Draft, sign: int = 1) -> None:
        """What one expert makes its ranks do; -1 takes it out again."""
        ranks, primary, now = draft.holders[expert], draft.primary[expert], draft.problem.current
        counts, before = draft.problem.counts_of[expert], now.holders[expert]
        shared = draft.problem.costs.shared_owners
        part = exchanged(len(ranks), False, True)[0]
        for rank, amount in zip(ranks, draft.shares[expert], strict=True):
            most = counts[rank]
            self.kept[rank] += sign * (amount if amount < most else most)
            sent, received = (part, part) if shared else exchanged(len(ranks), rank == primary, False)
            self.sends[rank] += sign * sent
            self.receives[rank] += sign * received
        self.owned[primary] += sign
        weight, state = sign * draft.problem.move_seconds, sign * draft.problem.state_seconds
        for move in expert_moves(before, ranks, None if shared else (now.primary[expert], primary)):
            self.copied += sign * move.weights_in
            self.gets[move.rank] += weight * move.weights_in + state * move.states_in
            self.gives[move.rank] += weight * move.weights_out + state * move.states_out


@dataclass(frozen=True)
class Draft:
    problem: PlanProblem
    slots: list[list[int]]
    holders: list[tuple[int, ...]]
    """Ranks of each expert."""
    primary: list[int]
    """They stay where they can; where one is gone, the holder that owns least takes over."""
    pools: list[Pool]
    """The average loads, poured over their holders, and the futures of the problem."""
    books: Books

    @classmethod
    def of(cls, placement: Placement, problem: PlanProblem) -> Draft:
        """The slots are those of the placement, which may be fewer than the problem allows."""
        slots, holders = list(map(list, placement.slots)), list(placement.holders)
        homes = zip(problem.current.primary, placement.primary, holders, strict=True)
        primary = [home if home in ranks else chosen for home, chosen, ranks in homes]
        pools = [Pool.even(loads, holders, len(slots)) for loads in (problem.loads, *problem.futures)]
        draft = cls(problem, slots, holders, primary, pools, Books(len(slots)))
        for expert in range(len(holders)):
            draft.books.enter(expert, draft)
        return draft.poured()

    @property
    def level(self) -> list[float]:
        """Rows that each rank computes of the average loads."""
        return self.pools[0].level

    @property
    def shares(self) -> list[list[float]]:
        """Load of each expert on its holders, on average."""
        return self.pools[0].shares

    @cached_property
    def fullest(self) -> float:
        return max(self.level)

    @cached_property
    def seconds(self) -> float:
        """Of a step, as `problem.judge` will say once loads are cut into rows."""
        return self._seconds(max)

    @cached_property
    def merit(self) -> float:
        """The same, softened: what a search goes down."""
        return self._seconds(power_mean)

    def _seconds(self, most: Callable[[list[float]], float]) -> float:
        problem, costs = self.problem, self.problem.costs
        return (
            costs.row_seconds * sum([most(pool.level) for pool in self.pools]) / len(self.pools)
            + self._wire_seconds(most)
            + problem.copy_seconds * most(self.copies)
            + (costs.replicas_seconds if max(self.copies) > NOTHING else 0.0)
            + most(self.migration)
            + problem.turnover_seconds * self.books.copied
        )

    def _wire_seconds(self, most: Callable[[list[float]], float]) -> float:
        """Rows that leave their rank, inside nodes and between them."""
        problem, costs = self.problem, self.problem.costs
        enter = [a - b for a, b in zip(self.level, self.books.kept, strict=True)]
        leave = [a - b for a, b in zip(problem.source, self.books.kept, strict=True)]
        far = 0.0
        if problem.num_nodes > 1:
            far_in, far_out = self.rows_across_nodes
            card_P = np.maximum(far_in, far_out)
            if not costs.card_per_rank:
                node_P = problem.node_index
                card_P = np.maximum(np.bincount(node_P, far_in), np.bincount(node_P, far_out))
            far = most(card_P.tolist())
            enter = [a - b for a, b in zip(enter, far_in.tolist(), strict=True)]
            leave = [a - b for a, b in zip(leave, far_out.tolist(), strict=True)]
        near = sum(enter) / len(enter) if costs.shared_wire else most(list(map(max, enter, leave)))
        return EXCHANGES * costs.row_bytes * (near / costs.near_bandwidth + far / costs.far_bandwidth)

    @cached_property
    def rows_across_nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that each rank gets from other nodes and sends there: what its node cannot keep of an expert.

        A row stays on its rank where it can, then on its node; which of the others cross is not known yet, so
        ranks of a node take part in what crosses as they do in what leaves ranks.
        """
        problem, node_P = self.problem, self.problem.node_index
        rank_X, share_X = list(chain(*self.holders)), np.array(list(chain(*self.shares)))
        expert_X = np.repeat(np.arange(len(self.holders)), list(map(len, self.holders)))
        node_X = node_P[rank_X]
        kept_X = np.minimum(share_X, problem.counts_PE[rank_X, expert_X])
        size = problem.num_nodes * len(self.holders)
        load_NE, come_NE = (
            np.bincount(node_X * len(self.holders) + expert_X, rows_X, size).reshape(problem.num_nodes, -1)
            for rows_X in (share_X, share_X - kept_X)
        )
        kept_NE = np.minimum(load_NE, problem.rows_NE)
        go_PE = problem.counts_PE.astype(float)
        go_PE[rank_X, expert_X] -= kept_X
        go_NE = problem.rows_NE - (load_NE - come_NE)
        came_NE = _parts(load_NE - kept_NE, come_NE)
        gone_NE = _parts(problem.rows_NE - kept_NE, go_NE)
        far_in = np.bincount(rank_X, (share_X - kept_X) * came_NE[node_X, expert_X], len(self.slots))
        return far_in, (go_PE * gone_NE[node_P]).sum(1)

    @cached_property
    def migration(self) -> list[float]:
        """Seconds of a step that each rank's link needs for the way there."""
        if self.problem.costs.shared_wire:
            return [sum(self.books.gets) / len(self.slots)]
        return list(map(max, self.books.gets, self.books.gives))

    @cached_property
    def copies(self) -> list[float]:
        """Copies of gradients that each rank sends or receives."""
        num_ranks = len(self.slots)
        if self.problem.costs.shared_wire:
            return [(sum(map(len, self.holders)) - len(self.holders)) / num_ranks]
        return list(map(max, self.books.sends, self.books.receives))

    def poured(self) -> Draft:
        """With all loads poured anew."""
        pools = [pool.copy() for pool in self.pools]
        after = Draft(self.problem, self.slots, self.holders, self.primary, pools, self.books.copy())
        after._pour(range(len(self.holders)), FULL_SWEEPS)
        return after

    def _pour(self, experts: Iterable[int], sweeps: int) -> None:
        """Into a draft that nobody else has seen yet."""
        loads, counts_of = self.problem.loads, self.problem.counts_of
        several = [e for e in experts if len(self.holders[e]) > 1]
        several.sort(key=lambda e: -loads[e])
        kept, shares = self.books.kept, self.shares
        before = [shares[e] for e in several]
        for pool in self.pools:
            pool.pour(several, self.holders, sweeps)
        for e, was in zip(several, before, strict=True):
            counts = counts_of[e]
            for rank, old, new in zip(self.holders[e], was, shares[e], strict=True):
                most = counts[rank]
                kept[rank] += (new if new < most else most) - (old if old < most else most)

    def settled(self, change: Change) -> Draft:
        """After a change, with all loads poured anew."""
        after = self.changed(change)
        after._pour(range(len(self.holders)), FULL_SWEEPS)
        return after

    def changed(self, change: Change) -> Draft:
        """After a change, its experts spread evenly over their holders, nothing poured yet."""
        slots, books = list(self.slots), self.books.copy()
        target, to_rank = change.target, change.to_rank
        leaving = slots[target][change.slot]
        slots[target] = list(slots[target])
        slots[target][change.slot] = change.put
        ranks = {e: set(self.holders[e]) for e in (change.put, leaving) if e != EMPTY}
        if change.put != EMPTY:
            ranks[change.put].add(target)
        if leaving != EMPTY:
            ranks[leaving].remove(target)
        if to_rank != EMPTY:
            yielding = slots[to_rank][change.to_slot]
            slots[to_rank] = list(slots[to_rank])
            slots[to_rank][change.to_slot] = leaving
            if yielding != EMPTY:
                ranks.setdefault(yielding, set(self.holders[yielding])).remove(to_rank)
            if leaving != EMPTY:
                ranks[leaving].add(to_rank)
        pools = [pool.copy() for pool in self.pools]
        after = Draft(self.problem, slots, list(self.holders), list(self.primary), pools, books)
        for expert, new in ranks.items():
            books.enter(expert, self, -1)
            after._put(expert, tuple(sorted(new)))
            books.enter(expert, after)
        return after

    def _put(self, expert: int, new: tuple[int, ...]) -> None:
        """An expert on other ranks."""
        for pool in self.pools:
            pool.spread(expert, self.holders[expert], new)
        self.holders[expert] = new
        home = self.problem.current.primary[expert]
        if home in new:
            self.primary[expert] = home
        elif self.primary[expert] not in new:
            self.primary[expert] = min(new, key=lambda rank: (self.books.owned[rank], rank))

    def trial(self, change: Change) -> Draft:
        """After a change, with only the experts around it poured."""
        after = self.changed(change)
        ranks = {change.target, change.to_rank, self.level.index(max(self.level))} - {EMPTY}
        near = {e for rank in ranks for row in (self.slots[rank], after.slots[rank]) for e in row}
        near.discard(EMPTY)
        after._pour(sorted(near), TRIAL_SWEEPS)
        return after

    def placement(self) -> Placement:
        return Placement(tuple(map(tuple, self.slots)), tuple(self.primary))


def _parts(of: np.ndarray, all_of: np.ndarray) -> np.ndarray:
    return of / np.where(all_of > 0, all_of, 1.0)


def power_mean(values: list[float]) -> float:
    """It feels the largest, and those next to it."""
    largest = max(values)
    if largest <= 0:
        return 0.0
    felt = FELT * largest
    return largest * (sum([(x / largest) ** POWER for x in values if x > felt]) / len(values)) ** (1 / POWER)
