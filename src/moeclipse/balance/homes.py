"""Who steps for which expert, and what travels for it: a placement as the optimizer sees it.

Idea. The ranks of an expert group hold the slots of one placement, and `copies` such groups hold it alike. A
*home* is what steps together: with reduce "sum" one for each expert, whose gradients all of its replicas in
all copies send to one owner; with "fedavg" one for each replica, which steps for itself. The owner has the
master weights and the optimizer state, and nobody else does.

    gradients   holders -> owner     one uneven exchange, added up in the order of ranks
    weights     owner -> holders     the same exchange backwards
    parcels     old homes -> new     weights for new replicas, state for new owners

Contract: pure; every rank computes the same. Who owns what changes as little as the new placement allows, and
the owners of a rank's homes are spread evenly over the copies.

Ranks are counted copy by copy: rank p of copy c is place c x P + p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from moeclipse.balance.placement import EMPTY, Placement, primary_bounds

Reduce = Literal["sum", "fedavg"]


@dataclass(frozen=True, kw_only=True)
class Home:
    expert: int
    members: tuple[int, ...]
    """Ranks of a copy whose gradients are summed."""
    rank: int
    """The rank of the owner, one of the members, ..."""
    copy: int
    """... and its copy."""


@dataclass(frozen=True, kw_only=True)
class Ties:
    """What one rank exchanges with each other place: its slots towards owners, what it owns towards holders.

    Its own part stays: `own_slots[i]` belongs to `own_homes[i]`.
    """

    slots: tuple[tuple[int, ...], ...]
    """For each place, the slots whose gradients go there and whose weights come from there."""
    homes: tuple[tuple[int, ...], ...]
    """For each place, which of this rank's homes get gradients from there and send weights there."""
    own_slots: tuple[int, ...]
    own_homes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One expert's weights or optimizer state on the way from place to place."""

    expert: int
    state: bool
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Homes:
    placement: Placement
    copies: int
    reduce: Reduce
    homes: tuple[Home, ...]

    @classmethod
    def of(
        cls,
        placement: Placement,
        copies: int = 1,
        *,
        reduce: Reduce = "sum",
        layer: int = 0,
        old: Homes | None = None,
    ) -> Homes:
        """Owners stay where they were in `old`, as far as the placement allows."""
        keys = [
            (expert, rank)
            for expert, ranks in enumerate(placement.holders)
            for rank in (ranks if reduce == "fedavg" else (placement.primary[expert],))
        ]
        copy_of: dict[tuple[int, int], int] = {}
        for rank in range(placement.num_ranks):
            mine = sorted((placement.slots[rank].index(e), e) for e, r in keys if r == rank)
            experts = [expert for _, expert in mine]
            before = {} if old is None else {h.expert: h.copy for h in old.homes if h.rank == rank}
            for expert, copy in zip(experts, _spread(experts, before, copies, layer), strict=True):
                copy_of[expert, rank] = copy
        homes = tuple(
            Home(
                expert=expert,
                members=placement.holders[expert] if reduce == "sum" else (rank,),
                rank=rank,
                copy=copy_of[expert, rank],
            )
            for expert, rank in keys
        )
        return cls(placement=placement, copies=copies, reduce=reduce, homes=homes)

    @property
    def num_places(self) -> int:
        return self.copies * self.placement.num_ranks

    def owner(self, home: Home) -> int:
        return home.copy * self.placement.num_ranks + home.rank

    def owned(self, place: int) -> tuple[Home, ...]:
        """What a place steps for, by expert."""
        return tuple(home for home in self.homes if self.owner(home) == place)

    @cached_property
    def slot_of(self) -> dict[tuple[int, int], int]:
        """(rank, expert) -> slot, counted on that rank."""
        table = self.placement.slots
        return {(p, e): s for p, row in enumerate(table) for s, e in enumerate(row) if e != EMPTY}

    def ties(self, place: int) -> Ties:
        rank = place % self.placement.num_ranks
        slots: list[list[int]] = [[] for _ in range(self.num_places)]
        homes: list[list[int]] = [[] for _ in range(self.num_places)]
        own_slots, own_homes, position = [], [], 0
        for home in self.homes:
            owner = self.owner(home)
            if owner == place:
                own_slots.append(self.slot_of[rank, home.expert])
                own_homes.append(position)
                for holder in self._holders(home):
                    if holder != place:
                        homes[holder].append(position)
                position += 1
            elif rank in home.members:
                slots[owner].append(self.slot_of[rank, home.expert])
        return Ties(
            slots=tuple(map(tuple, slots)),
            homes=tuple(map(tuple, homes)),
            own_slots=tuple(own_slots),
            own_homes=tuple(own_homes),
        )

    def _holders(self, home: Home) -> Iterator[int]:
        for copy in range(self.copies):
            for rank in home.members:
                yield copy * self.placement.num_ranks + rank

    def source(self, home: Home) -> Home:
        """Where the state of a home of the next placement comes from: its own, or that of the primary."""
        mine = [old for old in self.homes if old.expert == home.expert]
        same = [old for old in mine if self.reduce == "fedavg" and old.rank == home.rank]
        first = [old for old in mine if old.rank == self.placement.primary[home.expert]]
        return (same or first)[0]

    def parcels(self, new: Homes) -> tuple[Parcel, ...]:
        """What has to travel for `new` to hold, by expert and target."""
        width = self.placement.num_ranks
        found = [
            Parcel(expert=move.expert, state=False, source=c * width + move.source, target=c * width + t)
            for move in self.placement.moves(new.placement)
            if move.weights
            for c in range(self.copies)
            for t in (move.target,)
        ]
        for home in new.homes:
            source, target = self.owner(self.source(home)), new.owner(home)
            if source != target:
                found.append(Parcel(expert=home.expert, state=True, source=source, target=target))
        return tuple(sorted(found, key=lambda p: (p.expert, p.target, p.state)))


def _spread(experts: list[int], before: dict[int, int], copies: int, layer: int) -> list[int]:
    """A copy for each expert, as even as can be; those in `before` stay where that allows it."""
    bounds = primary_bounds(len(experts), copies, layer)
    room = [stop - start for start, stop in pairwise(bounds)]
    if not before:
        return [copy for copy, count in enumerate(room) for _ in range(count)]
    # Which copies take one more is free: those that own most keep it.
    share = len(experts) // copies
    counts = [sum(before.get(expert) == copy for expert in experts) for copy in range(copies)]
    larger = sorted(range(copies), key=lambda copy: (-counts[copy], copy))[: len(experts) % copies]
    room = [share + (copy in larger) for copy in range(copies)]
    found: list[int] = []
    for expert in experts:
        copy = before.get(expert, -1)
        if copy >= 0 and room[copy] > 0:
            room[copy] -= 1
        else:
            copy = -1
        found.append(copy)
    for number, copy in enumerate(found):
        if copy < 0:
            found[number] = max(range(copies), key=lambda c: (room[c], -c))
            room[found[number]] -= 1
    return found
