"""Who steps for which expert, and what is sent for it: a placement as the optimizer sees it.

Idea. The ranks of an expert group hold the slots of one placement, and `copies` such groups hold it alike. An
*owner* has master weights and optimizer state, and nobody else has the same. With reduce "sum" each replica
of an expert owns a part of its elements, so that a hot expert's gradients do not all meet on one rank:

    gradients   holders -> owner of the part     one uneven exchange, added up in the order of ranks
    weights     owner of the part -> holders     the same exchange backwards
    transfers   old -> new owners                weights for new replicas, state for new owners

With r replicas each of them sends and receives (r - 1) / r of the expert. With "fedavg" each replica has an
owner of all elements, and steps for itself.

Contract: pure; every rank computes the same. Which elements a replica owns follows from the placement alone:
its place among the expert's ranks, in ascending order. What a rank's replicas own is spread evenly over the
copies, and stays in its copy where the new placement allows it.

Parts begin at multiples of `grain` elements of each parameter, so that what is kept by blocks (moments in 8
bits) is never cut inside one. Experts smaller than that have one owner.

Ranks are counted copy by copy: rank p of copy c has the index c x P + p in the group of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from moeclipse.balance.placement import EMPTY, Placement, primary_bounds
from moeclipse.core.shares import even_bounds

Reduce = Literal["sum", "fedavg"]
GRAIN = 2048


@dataclass(frozen=True, kw_only=True)
class Owner:
    expert: int
    members: tuple[int, ...]
    """Ranks of a copy whose gradients it sums."""
    rank: int
    """Its own rank, one of the members, ..."""
    copy: int
    """... and its copy."""
    part: int = 0
    """Which part of the elements it owns, ..."""
    parts: int = 1
    """... of so many."""
    grain: int = GRAIN

    def stretch(self, size: int) -> tuple[int, int]:
        """First and last (excluded) of its elements of a parameter that has so many."""
        grains = even_bounds(-(-size // self.grain), self.parts)
        first, last = (min(self.grain * bound, size) for bound in grains[self.part : self.part + 2])
        return first, last

    def overlap(self, other: Owner, size: int) -> tuple[int, int]:
        """What both own of a parameter; without any, the last is not behind the first."""
        (a, b), (c, d) = self.stretch(size), other.stretch(size)
        return max(a, c), min(b, d)


@dataclass(frozen=True, kw_only=True)
class OwnerExchange:
    """What one rank exchanges with each other: its slots towards owners, what it owns towards holders."""

    slots: tuple[tuple[tuple[int, Owner], ...], ...]
    """By index, slots of which a part's gradients go there and its weights come from there; whose part."""
    owned: tuple[tuple[int, ...], ...]
    """By index, which of what this rank owns gets gradients from there and sends weights there."""
    own_slots: tuple[int, ...]
    """The slots of what this rank owns, which stay here."""


@dataclass(frozen=True, kw_only=True)
class ExpertTransfer:
    """One expert's weights, or optimizer state of a part of it, on the way from index to index."""

    expert: int
    state: bool
    source: int
    target: int
    owners: tuple[Owner, Owner] | None = None
    """Of state: who had it and who gets it; what both own travels."""


@dataclass(frozen=True, kw_only=True)
class Ownership:
    placement: Placement
    copies: int
    reduce: Reduce
    owners: tuple[Owner, ...]

    @classmethod
    def of(
        cls,
        placement: Placement,
        copies: int = 1,
        *,
        reduce: Reduce = "sum",
        layer: int = 0,
        old: Ownership | None = None,
        grain: int = GRAIN,
    ) -> Ownership:
        """Owners stay in the copies where they were in `old`, as far as the placement allows."""
        keys = [(expert, rank) for expert, ranks in enumerate(placement.holders) for rank in ranks]
        copy_of: dict[tuple[int, int], int] = {}
        for rank in range(placement.num_ranks):
            mine = sorted((placement.slots[rank].index(e), e) for e, r in keys if r == rank)
            experts = [expert for _, expert in mine]
            before = {} if old is None else {o.expert: o.copy for o in old.owners if o.rank == rank}
            for expert, copy in zip(experts, _spread(experts, before, copies, layer), strict=True):
                copy_of[expert, rank] = copy
        owners = tuple(
            Owner(
                expert=expert,
                members=members,
                rank=rank,
                copy=copy_of[expert, rank],
                part=members.index(rank),
                parts=len(members),
                grain=grain,
            )
            for expert, rank in keys
            for members in (placement.holders[expert] if reduce == "sum" else (rank,),)
        )
        return cls(placement=placement, copies=copies, reduce=reduce, owners=owners)

    @property
    def group_size(self) -> int:
        return self.copies * self.placement.num_ranks

    def index_of(self, owner: Owner) -> int:
        return owner.copy * self.placement.num_ranks + owner.rank

    def owned_by(self, index: int) -> tuple[Owner, ...]:
        """What a rank steps for, by expert."""
        return tuple(owner for owner in self.owners if self.index_of(owner) == index)

    @cached_property
    def owners_of(self) -> dict[int, tuple[Owner, ...]]:
        """By expert, in the order of their ranks."""
        found: dict[int, tuple[Owner, ...]] = {}
        for owner in self.owners:
            found[owner.expert] = (*found.get(owner.expert, ()), owner)
        return found

    @cached_property
    def slot_of(self) -> dict[tuple[int, int], int]:
        """(rank, expert) -> slot, counted on that rank."""
        table = self.placement.slots
        return {(p, e): s for p, row in enumerate(table) for s, e in enumerate(row) if e != EMPTY}

    def exchange_of(self, index: int) -> OwnerExchange:
        rank = index % self.placement.num_ranks
        slots: list[list[tuple[int, Owner]]] = [[] for _ in range(self.group_size)]
        owned: list[list[int]] = [[] for _ in range(self.group_size)]
        own_slots: list[int] = []
        for owner in self.owners:
            there = self.index_of(owner)
            if there == index:
                for holder in self._holders(owner):
                    if holder != index:
                        owned[holder].append(len(own_slots))
                own_slots.append(self.slot_of[rank, owner.expert])
            elif rank in owner.members:
                slots[there].append((self.slot_of[rank, owner.expert], owner))
        return OwnerExchange(
            slots=tuple(map(tuple, slots)), owned=tuple(map(tuple, owned)), own_slots=tuple(own_slots)
        )

    def _holders(self, owner: Owner) -> Iterator[int]:
        for copy in range(self.copies):
            for rank in owner.members:
                yield copy * self.placement.num_ranks + rank

    def sources(self, new: Owner) -> tuple[Owner, ...]:
        """Whose state an owner under the next placement takes over: with fedavg its own or the primary's."""
        mine = self.owners_of[new.expert]
        if self.reduce == "sum":
            return mine
        same = tuple(old for old in mine if old.rank == new.rank)
        return same or tuple(old for old in mine if old.rank == self.placement.primary[new.expert])

    def transfers(self, new: Ownership, sizes: Sequence[int]) -> tuple[ExpertTransfer, ...]:
        """What has to travel for `new` to hold, by expert and target.

        `sizes`: elements of each parameter of an expert that has optimizer state.
        """
        width = self.placement.num_ranks
        found = [
            ExpertTransfer(
                expert=move.expert,
                state=False,
                source=copy * width + move.source,
                target=copy * width + move.target,
            )
            for move in self.placement.moves(new.placement)
            if move.weights
            for copy in range(self.copies)
        ]
        for owner in new.owners:
            target = new.index_of(owner)
            for old in self.sources(owner):
                source = self.index_of(old)
                both = [old.overlap(owner, size) for size in sizes]
                if source != target and any(first < last for first, last in both):
                    found.append(
                        ExpertTransfer(
                            expert=owner.expert,
                            state=True,
                            source=source,
                            target=target,
                            owners=(old, owner),
                        )
                    )
        return tuple(sorted(found, key=lambda t: (t.expert, t.target, t.state, t.source)))


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
