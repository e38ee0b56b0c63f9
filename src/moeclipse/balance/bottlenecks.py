"""A search that sees bottlenecks: ranks that share loads among themselves and can hand none of it on.

Idea. However rows are split, a set S of ranks computes at least what stands nowhere else, so one of them has

    confined(S) / |S|      confined: the load of all experts whose replicas stand inside S

and the best split reaches the largest of these bounds over all sets: maximum flow is minimum cut. Few of them
are ever tight. So a table is judged by sets that were tight once, in microseconds where pouring takes
milliseconds, and thousands of changes can be tried: any two experts exchanged, any replica put elsewhere,
a worse one now and then. The table that comes out is poured in full, its tight sets join the others, and so
on. A search that relieves one full rank at a time ends soon, in tables that are perfect for the average loads
and brittle for all others (`balance/futures`); this one finds tables that bear them.

Contract: pure and deterministic: work is counted, never timed. It counts rows and copies alone; whoever calls
it compares what it finds by all seconds of a step.

Shapes: K loads, E experts, C sets of ranks.
"""

from __future__ import annotations

import math
import random
from itertools import combinations

import numpy as np

from moeclipse.balance.draft import Draft
from moeclipse.balance.futures import Pool
from moeclipse.balance.placement import EMPTY, Placement

MOST_RANKS = 62
"""Sets of ranks are bits of a word."""
PAIRED_RANKS = 24
"""Up to so many ranks all pairs of them are known from the start."""
ROUNDS, TRIES = 30, 300
"""Of pouring, and of changes between two of them."""
PATIENCE = 3
"""Rounds without any change for the better, after which no other is begun."""
TAKEN = 3
"""Changes for the better, after which the table is poured: sets that nobody knows may be tight by now."""
WARM = 0.0005
"""In mean loads: how much worse a change may be, about, that is taken all the same."""
SAME = 1e-9
TIGHT = 1e-3
"""Of a load: a smaller share is as good as none."""
EVEN = 1e-3
"""Fullest ranks so near the mean need no better table."""


def steadied(draft: Draft, rounds: int = ROUNDS, tries: int = TRIES) -> Draft:
    """The draft, or one that bears its loads better."""
    if len(draft.pools) == 1 or len(draft.slots) > MOST_RANKS:
        return draft
    walk, patience = Walk(draft), PATIENCE
    for _ in range(rounds):
        if walk.fullest < 1 + EVEN or not patience:
            break
        if not walk.improve(tries):
            patience -= 1
            continue
        after = Draft.of(walk.placement(), draft.problem)
        walk.learn(after)
        if after.seconds < draft.seconds:
            draft = after
        walk.stand_at(draft)
    return draft


Swap = tuple[tuple[int, int, int], ...]
"""What stands in one or two slots afterwards: rank, slot, expert."""


class Walk:
    """Tables that follow from one another by random changes, judged by the sets that were tight once."""

    def __init__(self, draft: Draft) -> None:
        problem = draft.problem
        self.rng = random.Random(0)
        self.current = problem.current
        load_KE = np.array([pool.loads for pool in draft.pools])
        working = sum(count > 0 for count in problem.slots_P)
        self.load_KE = load_KE * working / load_KE.sum(1, keepdims=True)
        """In mean loads of a rank."""
        mean_s = problem.costs.row_seconds * float(load_KE[0].sum()) / working
        self.copy_price = (problem.turnover_seconds + problem.move_seconds) / mean_s if mean_s > 0 else 0.0
        ranks = range(len(draft.slots))
        pairs = combinations(ranks, 2) if len(ranks) <= PAIRED_RANKS else ()
        sets = [1 << rank for rank in ranks] + [1 << p | 1 << q for p, q in pairs]
        self.set_C = np.array(sets, dtype=np.uint64)
        self.learn(draft)
        self.stand_at(draft)

    def learn(self, draft: Draft) -> None:
        """What is tight in a draft that has been poured."""
        new = {tight_ranks(draft, pool) for pool in draft.pools} - set(self.set_C.tolist())
        self.set_C = np.concatenate([self.set_C, np.array(sorted(new), dtype=np.uint64)])
        self.scale_C = 1.0 / np.array([ranks.bit_count() for ranks in self.set_C.tolist()])

    def stand_at(self, draft: Draft) -> None:
        """Go on from there."""
        self._read([list(row) for row in draft.slots])

    def _read(self, slots: list[list[int]]) -> None:
        """All that follows from slots and sets."""
        self.slots = slots
        self.mask_E = np.zeros(self.load_KE.shape[1], dtype=np.uint64)
        self.copies = 0
        """That the current placement lacks."""
        for rank, row in enumerate(slots):
            for expert in row:
                self._turn(rank, expert, 1)
        inside_CE = (self.mask_E & ~self.set_C[:, None]) == 0
        self.bound_CK = (inside_CE @ self.load_KE.T) * self.scale_C[:, None]

    def _turn(self, rank: int, expert: int, by: int) -> None:
        """An expert more (1) or less (-1) on a rank."""
        if expert != EMPTY:
            self.mask_E[expert] ^= np.uint64(1 << rank)
            self.copies += 0 if expert in self.current.held[rank] else by

    @property
    def fullest(self) -> float:
        """The largest of the known bounds, on average over loads."""
        return float(self.bound_CK.max(0).sum()) / len(self.load_KE)

    @property
    def price(self) -> float:
        return self.fullest + self.copy_price * self.copies

    def improve(self, tries: int) -> bool:
        """Try changes until a few have helped, and stand at the best table; false where none has."""
        now = best = self.price
        kept: list[list[int]] | None = None
        taken = 0
        for _ in range(tries):
            swap = self._guess()
            if swap is None:
                continue
            undo = self._put(swap)
            price = self.price
            # What changes nothing that is known may break what is not: only a difference is followed.
            worse = price > now + SAME and self.rng.random() < math.exp((now - price) / WARM)
            if price >= now - SAME and not worse:
                self._take_back(*undo)
                continue
            now = price
            if price < best:
                best, kept, taken = price, [list(row) for row in self.slots], taken + 1
                if taken == TAKEN:
                    break
        if kept is not None:
            self._read(kept)
        return kept is not None

    def _guess(self) -> Swap | None:
        """Two experts exchanged, or a replica in a slot that can be spared; None where that cannot be."""
        rng, slots = self.rng, self.slots
        rank, other = rng.randrange(len(slots)), rng.randrange(len(slots))
        if not slots[rank] or not slots[other]:
            return None
        slot, place = rng.randrange(len(slots[rank])), rng.randrange(len(slots[other]))
        mine, theirs = slots[rank][slot], slots[other][place]
        if rng.random() < 0.5:
            if rank == other or mine == theirs or _holds(slots[other], mine) or _holds(slots[rank], theirs):
                return None
            return (rank, slot, theirs), (other, place, mine)
        expert = rng.randrange(len(self.mask_E))
        if expert in slots[rank] or (mine != EMPTY and int(self.mask_E[mine]).bit_count() == 1):
            return None
        return ((rank, slot, expert),)

    def _put(self, swap: Swap) -> tuple[Swap, np.ndarray]:
        """Change the table; returns what takes it back."""
        back = tuple((rank, slot, self.slots[rank][slot]) for rank, slot, _ in swap)
        touched = {expert for _, _, expert in (*swap, *back)} - {EMPTY}
        before = {expert: self.mask_E[expert] for expert in touched}
        self._set(swap)
        bound_CK, outside_C = self.bound_CK, ~self.set_C
        for expert, mask in before.items():
            then_C, now_C = (mask & outside_C) == 0, (self.mask_E[expert] & outside_C) == 0
            change_C = (now_C.astype(float) - then_C) * self.scale_C
            bound_CK = bound_CK + change_C[:, None] * self.load_KE[:, expert]
        old, self.bound_CK = self.bound_CK, bound_CK
        return back, old

    def _take_back(self, back: Swap, bound_CK: np.ndarray) -> None:
        self._set(back)
        self.bound_CK = bound_CK

    def _set(self, swap: Swap) -> None:
        for rank, slot, _ in swap:
            self._turn(rank, self.slots[rank][slot], -1)
        for rank, slot, expert in swap:
            self.slots[rank][slot] = expert
            self._turn(rank, expert, 1)

    def placement(self) -> Placement:
        """Whoever pours it brings primaries home (`Draft.of`)."""
        return Placement(tuple(map(tuple, self.slots)))


def _holds(row: list[int], expert: int) -> bool:
    return expert != EMPTY and expert in row


def tight_ranks(draft: Draft, pool: Pool) -> int:
    """The fullest rank, and all to which load could flow from it: the set that is tight, as bits."""
    fullest = pool.level.index(max(pool.level))
    found, todo = 1 << fullest, [fullest]
    while todo:
        rank = todo.pop()
        for expert in draft.slots[rank]:
            if expert == EMPTY or len(draft.holders[expert]) == 1:
                continue
            holders = draft.holders[expert]
            if pool.shares[expert][holders.index(rank)] <= TIGHT * pool.loads[expert]:
                continue
            for other in holders:
                if not found >> other & 1:
                    found |= 1 << other
                    todo.append(other)
    return found
