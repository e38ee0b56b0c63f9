"""A placement in the making: loads poured over slots, and changes tried out cheaply.

Idea: planners try hundreds of changes. A try copies little, pours again only the experts that the change
touches, and is judged by a power mean over the ranks' levels; only the change that is taken is poured in
full.

A rank whose experts have no other replica cannot hand anything over when loads fluctuate. So its level
counts a reserve on top: `noise` (how much an expert's load jitters from step to step, relative) times the
root of the sum of squares of those loads. Planning for the mean alone would fill such ranks to the brim,
and each step one of them would run over.

Contract: a `Draft` is never changed by `changed`, `trial` or `poured`; they return another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.split import sweep

POWER = 64
FULL_SWEEPS = 20
TRIAL_SWEEPS = 2


@dataclass(frozen=True, kw_only=True)
class Change:
    """`put` goes into a slot of rank `target`.

    What was there gives way, or goes into another slot (`to_rank`, `to_slot`) and what was *there* gives
    way; if that was `put` itself, two experts have been exchanged.
    """

    put: int
    target: int
    slot: int
    to_rank: int = EMPTY
    to_slot: int = EMPTY

    @property
    def moves(self) -> int:
        return 1 if self.to_rank == EMPTY else 2


@dataclass(frozen=True)
class Draft:
    loads: list[float]
    noise: float
    slots: list[list[int]]
    holders: list[tuple[int, ...]]
    """Ranks of each expert."""
    shares: list[list[float]]
    """Load of each expert on these ranks."""
    level: list[float]
    """Load of each rank, its reserve included."""
    reserve: list[float]

    @classmethod
    def of(cls, placement: Placement, slots_P: Sequence[int], load_E: np.ndarray, noise: float) -> Draft:
        slots = [
            list(row) + [EMPTY] * (count - len(row))
            for row, count in zip(placement.slots, slots_P, strict=True)
        ]
        loads = load_E.astype(float).tolist()
        shares = [
            [load / len(ranks)] * len(ranks) for load, ranks in zip(loads, placement.holders, strict=True)
        ]
        empty = [0.0] * len(slots)
        draft = cls(loads, noise, slots, list(placement.holders), shares, empty, empty)
        reserve = [draft._reserve(row) for row in slots]
        level = list(reserve)
        for ranks, mine in zip(draft.holders, shares, strict=True):
            for rank, amount in zip(ranks, mine, strict=True):
                level[rank] += amount
        return cls(loads, noise, slots, draft.holders, shares, level, reserve).poured()

    @property
    def fullest(self) -> float:
        return max(self.level)

    def merit(self) -> float:
        """A power mean: it feels the fullest rank, and those next to it."""
        fullest = max(self.level)
        if fullest <= 0:
            return 0.0
        return fullest * (sum([(x / fullest) ** POWER for x in self.level]) / len(self.level)) ** (1 / POWER)

    def _reserve(self, row: list[int]) -> float:
        if not self.noise:
            return 0.0
        return self.noise * math.sqrt(
            sum([self.loads[e] ** 2 for e in row if e >= 0 and len(self.holders[e]) == 1])
        )

    def poured(self, experts: Sequence[int] | None = None, sweeps: int = FULL_SWEEPS) -> Draft:
        """With the loads of these experts (default: all) poured anew."""
        which = range(len(self.loads)) if experts is None else experts
        several = [e for e in which if len(self.holders[e]) > 1 and self.loads[e] > 0]
        several.sort(key=lambda e: -self.loads[e])
        jobs = [(e, self.holders[e], self.loads[e]) for e in several]
        level, shares = list(self.level), list(self.shares)
        for e in several:
            shares[e] = list(shares[e])
        fullest = max(level)
        for _ in range(sweeps):
            sweep(jobs, level, shares)
            before, fullest = fullest, max(level)
            if fullest > 0.9995 * before:
                break
        return Draft(self.loads, self.noise, self.slots, self.holders, shares, level, self.reserve)

    def changed(self, change: Change) -> Draft:
        """After a change, its experts spread evenly over their holders, nothing poured yet."""
        slots, holders, shares = list(self.slots), list(self.holders), list(self.shares)
        level, reserve = list(self.level), list(self.reserve)
        target, to_rank = change.target, change.to_rank
        leaving = slots[target][change.slot]
        slots[target] = list(slots[target])
        slots[target][change.slot] = change.put
        ranks = {e: set(holders[e]) for e in (change.put, leaving) if e != EMPTY}
        ranks[change.put].add(target)
        if leaving != EMPTY:
            ranks[leaving].remove(target)
        if to_rank != EMPTY:
            yielding = slots[to_rank][change.to_slot]
            slots[to_rank] = list(slots[to_rank])
            slots[to_rank][change.to_slot] = leaving
            if yielding != EMPTY:
                ranks.setdefault(yielding, set(holders[yielding])).remove(to_rank)
            if leaving != EMPTY:
                ranks[leaving].add(to_rank)
        # Reserves change where slots do, and where an expert stops or starts standing alone.
        touched = {target, to_rank} - {EMPTY}
        for expert, new in ranks.items():
            if (len(new) == 1) != (len(holders[expert]) == 1):
                touched |= new | set(holders[expert])
            old_share = dict(zip(holders[expert], shares[expert], strict=True))
            for rank, amount in old_share.items():
                level[rank] -= amount
            holders[expert] = tuple(sorted(new))
            kept = {rank: old_share.get(rank, 0.0) for rank in holders[expert]}
            lost = (self.loads[expert] - sum(kept.values())) / len(kept)
            shares[expert] = [amount + lost for amount in kept.values()]
            for rank, amount in zip(holders[expert], shares[expert], strict=True):
                level[rank] += amount
        after = Draft(self.loads, self.noise, slots, holders, shares, level, reserve)
        for rank in touched:
            level[rank] -= reserve[rank]
            reserve[rank] = after._reserve(slots[rank])
            level[rank] += reserve[rank]
        return after

    def trial(self, change: Change) -> Draft:
        """After a change, with only the experts around it poured."""
        after = self.changed(change)
        ranks = {change.target, change.to_rank, self.level.index(max(self.level))} - {EMPTY}
        near = {e for rank in ranks for row in (self.slots[rank], after.slots[rank]) for e in row}
        near.discard(EMPTY)
        return after.poured(sorted(near), TRIAL_SWEEPS)

    def placement(self, current: Placement) -> Placement:
        """Primaries stay where they can; where one is gone, the holder that owns least takes over."""
        owned = [0] * len(self.slots)
        primary = list(current.primary)
        for expert, rank in enumerate(primary):
            owned[rank] += rank in self.holders[expert]
        for expert, rank in enumerate(primary):
            if rank not in self.holders[expert]:
                primary[expert] = min(self.holders[expert], key=lambda p: (owned[p], p))
                owned[primary[expert]] += 1
        return Placement(tuple(map(tuple, self.slots)), tuple(primary))
