"""Who steps for which expert, and what is sent for it: a placement as the optimizer sees it.

Idea. The ranks of an expert group hold the slots of one placement, and `copies` such groups hold it alike. An
*owner* has the master weights and the optimizer state, and nobody else does. With reduce "sum" each expert
has one, to which all replicas in all copies send their gradients; with "fedavg" each replica has one, and
steps for itself.

    gradients   holders -> owner       one uneven exchange, added up in the order of ranks
    weights     owner -> holders       the same exchange backwards
    transfers   old -> new owners      weights for new replicas, state for new owners

Contract: pure; every rank computes the same. Who owns what changes as little as the new placement allows, and
what a rank's replicas own is spread evenly over the copies.

Ranks are counted copy by copy: rank p of copy c has the index c x P + p in the group of all of them.
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
class Owner:
    expert: int
    members: tuple[int, ...]
    """Ranks of a copy whose gradients it sums."""
    rank: int
    """Its own rank, one of the members, ..."""
    copy: int
    """... and its copy."""


@dataclass(frozen=True, kw_only=True)
class OwnerExchange:
    """What one rank exchanges with each other: its slots towards owners, what it owns towards holders."""

    slots: tuple[tuple[int, ...], ...]
    """By index, the slots whose gradients go there and whose weights come from there."""
    owned: tuple[tuple[int, ...], ...]
    """By index, which of what this rank owns gets gradients from there and sends weights there."""
    own_slots: tuple[int, ...]
    """The slots of what this rank owns, which stay here."""


@dataclass(frozen=True, kw_only=True)
class ExpertTransfer:
    """One expert's weights, or its optimizer state, on the way from index to index."""

    expert: int
    state: bool
    source: int
    target: int


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
    ) -> Ownership:
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
            before = {} if old is None else {o.expert: o.copy for o in old.owners if o.rank == rank}
            for expert, copy in zip(experts, _spread(experts, before, copies, layer), strict=True):
                copy_of[expert, rank] = copy
        owners = tuple(
            Owner(
                expert=expert,
                members=placement.holders[expert] if reduce == "sum" else (rank,),
                rank=rank,
                copy=copy_of[expert, rank],
            )
            for expert, rank in keys
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
    def slot_of(self) -> dict[tuple[int, int], int]:
        """(rank, expert) -> slot, counted on that rank."""
        table = self.placement.slots
        return {(p, e): s for p, row in enumerate(table) for s, e in enumerate(row) if e != EMPTY}

    def exchange_of(self, index: int) -> OwnerExchange:
        rank = index % self.placement.num_ranks
        slots: list[list[int]] = [[] for _ in range(self.group_size)]
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
                slots[there].append(self.slot_of[rank, owner.expert])
        return OwnerExchange(
            slots=tuple(map(tuple, slots)), owned=tuple(map(tuple, owned)), own_slots=tuple(own_slots)
        )

    def _holders(self, owner: Owner) -> Iterator[int]:
        for copy in range(self.copies):
            for rank in owner.members:
                yield copy * self.placement.num_ranks + rank

    def source(self, new: Owner) -> Owner:
        """Whose state an owner under the next placement takes over: its own, or that of the primary."""
        mine = [old for old in self.owners if old.expert == new.expert]
        same = [old for old in mine if self.reduce == "fedavg" and old.rank == new.rank]
        first = [old for old in mine if old.rank == self.placement.primary[new.expert]]
        return (same or first)[0]

    def transfers(self, new: Ownership) -> tuple[ExpertTransfer, ...]:
        """What has to travel for `new` to hold, by expert and target."""
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
            source, target = self.index_of(self.source(owner)), new.index_of(owner)
            if source != target:
                found.append(ExpertTransfer(expert=owner.expert, state=True, source=source, target=target))
        return tuple(sorted(found, key=lambda t: (t.expert, t.target, t.state)))


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
