"""Buckets of experts that have replicas or move: slot by slot, after a table of owners.

    launch     each holder sends every part of its slots' gradients to its owner     one uneven exchange
    reduced    the owner adds them up, in the order of ranks
    publish    the owner sends the new weights to all holders, behind their expert's number

A bucket holds one parameter of all slots of a layer on this rank ([slots, ...], empty ones included). Its
shard is what this rank owns, expert by expert: a stretch of elements of each of its slots, so master weights
are tensors of their own. `set_ownership` takes another table of owners when experts move; the storage stays
where it is.

No process group is made for an expert. With one for each set of holders every rank would have to enter every
new_group in one order at every new placement, and several of them in flight have no order among each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

import torch
from torch import nn

from moeclipse.balance.ownership import Owner, Ownership
from moeclipse.balance.placement import EMPTY
from moeclipse.comm.async_ops.lane import InFlight, Ready, Then, all_to_all
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.moe.layer import MoE
from moeclipse.ops.digest import digest_rows
from moeclipse.ops.precision import WIDE
from moeclipse.ops.raw_bytes import as_bytes
from moeclipse.tensor.cut import cut_of
from moeclipse.train.optim.bucket_contents import Content, entries_of
from moeclipse.train.optim.buckets import Bucket, BucketSegment, MainGrad

LABEL = 8
"""Bytes in front of each part that is published: layer, part and expert."""


class ExpertBucket(Bucket):
    """Parameter `key` of the experts of `layer` on this rank; `prefix` leads to its name in checkpoints."""

    def __init__(
        self,
        parameter: nn.Parameter,
        prefix: str,
        layer: MoE,
        key: str,
        ownership: Ownership,
        mesh: Mesh,
        main_grad: MainGrad = "fp32",
    ) -> None:
        self.layer, self.prefix, self.key = layer, prefix, key
        self.shape = tuple(parameter.shape[1:])
        self.size, self.num_slots = math.prod(self.shape), len(parameter)
        self.cut = cut_of(parameter)
        # The ranks of all copies of this layer's experts, on the communicator of gradients.
        group: Group = mesh.cut_grads if layer.sharded else mesh.dense_grads
        bounds = [0] * group.size + [parameter.numel()]
        content = Content(
            name=f"{prefix}experts.{key}",
            parameters=[parameter],
            entries=[],
            bounds=bounds,
            group=group,
            decay=True,
        )
        super().__init__(content, mesh, main_grad=main_grad)
        self.shared = True  # its masters are tensors of their own, also where nobody else has any of it
        self.set_ownership(ownership)

    def set_ownership(self, ownership: Ownership) -> None:
        """From now on these are the owners; weights and state are in place, or follow."""
        me = self.group.index
        exchange = ownership.exchange_of(me)
        self.ownership, self.owners_here = ownership, ownership.owned_by(me)
        self.starts = [0, *accumulate(last - first for first, last in map(self.stretch, self.owners_here))]
        # What is exchanged, by peer: stretches of the bucket for others, stretches of this rank's shard.
        self.leaving = [[self._place(slot, owner) for slot, owner in slots] for slots in exchange.slots]
        self.arriving = [[self._shard(which) for which in owned] for owned in exchange.owned]
        self.leaving_counts, self.arriving_counts = (
            list(map(_total, self.leaving)),
            list(map(_total, self.arriving)),
        )
        slots = zip(exchange.own_slots, self.owners_here, strict=True)
        self.own = [self._place(slot, owner) for slot, owner in slots]
        self.owned_here = list(map(self._shard, range(len(self.own))))
        self.slot_tags = self._tags(owner for slots in exchange.slots for _, owner in slots)
        self.arriving_tags = [
            self._tags(self.owners_here[which] for which in owned) for owned in exchange.owned
        ]
        # Where no expert has a second holder anywhere, all ranks know it, and nobody sends anything.
        self.quiet = ownership.copies == 1 and all(len(owner.members) == 1 for owner in ownership.owners)
        self.alone = not any(self.leaving) and not any(self.arriving)
        self.run = _run(self.own)

    def stretch(self, owner: Owner) -> tuple[int, int]:
        """What an owner has of an expert's elements in this bucket."""
        return owner.stretch(self.size)

    def _place(self, slot: int, owner: Owner) -> tuple[int, int]:
        """The same, counted inside the bucket."""
        first, last = self.stretch(owner)
        return slot * self.size + first, slot * self.size + last

    def _shard(self, which: int) -> tuple[int, int]:
        """What this rank owns of its `which`-th expert, counted inside its shard."""
        return self.starts[which], self.starts[which + 1]

    def _tags(self, owners: Iterable[Owner]) -> torch.Tensor:
        """A number for each part: layer, part, expert."""
        tags = [(self.layer.layer << 48) + (owner.part << 32) + owner.expert for owner in owners]
        return torch.tensor(tags, dtype=torch.int64, device=self.params.device)

    @property
    def slots(self) -> tuple[int, ...]:
        """The expert of each slot of this rank; EMPTY for empty ones."""
        placement = self.ownership.placement
        return placement.slots[self.group.index % placement.num_ranks]

    @property
    def rows(self) -> torch.Tensor:
        return self.params.view(self.num_slots, self.size)

    def launch(self) -> None:
        label = f"reduction of gradients, bucket {self.name}"
        if self.quiet:
            self._parts: InFlight[torch.Tensor] = Ready(self.grads[:0])
            return
        leaving = _cut(self.grads, [place for places in self.leaving for place in places])
        counts = (self.leaving_counts, self.arriving_counts)
        self._parts = all_to_all(self.mesh.grads, self.group, leaving, *counts, label)

    def reduced(self) -> torch.Tensor:
        """The summed gradients of what this rank owns: the parts of each in the order of ranks."""
        parts = self._parts.get().split(self.arriving_counts)
        del self._parts
        if self.alone:
            return self.grads[self.run] if self.run is not None else _cut(self.grads, self.own)
        total = self.grads.new_zeros(self.starts[-1])
        for peer, (owned, part) in enumerate(zip(self.arriving, parts, strict=True)):
            if peer == self.group.index:
                total += _cut(self.grads, self.own)
                continue
            offset = 0
            for first, last in owned:
                total[first:last] += part[offset : offset + last - first]
                offset += last - first
        return total

    def weights(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of the weights this rank owns."""
        return _cut(self.params, self.own).to(dtype or WIDE[self.params.dtype])

    @property
    def rounded(self) -> torch.Tensor | None:
        return self.params[self.run] if self.narrow and self.run is not None else None

    def store(self, weight: torch.Tensor) -> None:
        if self.run is not None:
            self.params[self.run] = weight.to(self.params.dtype)
            return
        for (first, last), (start, stop) in zip(self.own, self.owned_here, strict=True):
            self.params[first:last] = weight[start:stop].to(self.params.dtype)

    def publish(self) -> InFlight[torch.Tensor]:
        """Send the weights of what this rank owns to all ranks that hold it."""
        if self.quiet:
            return Ready(self.params)
        mine = _cut(self.params, self.own)
        parts: list[torch.Tensor] = []
        for owned, tags in zip(self.arriving, self.arriving_tags, strict=True):
            parts += [as_bytes(tags), as_bytes(_cut(mine, owned))]
        label = f"weights to replicas, bucket {self.name}"
        counts = (
            self._published(self.arriving_counts, self.arriving),
            self._published(self.leaving_counts, self.leaving),
        )
        return Then(all_to_all(self.mesh.grads, self.group, torch.cat(parts), *counts, label), self.install)

    def _published(self, counts: list[int], stretches: list[list[tuple[int, int]]]) -> list[int]:
        """Bytes to or from each peer: labels, and the weights behind them."""
        width = self.params.element_size()
        return [LABEL * len(each) + width * count for count, each in zip(counts, stretches, strict=True)]

    def install(self, arrived: torch.Tensor) -> torch.Tensor:
        """Put published weights into their slots, after a look at whose they are."""
        parts = arrived.split(self._published(self.leaving_counts, self.leaving))
        labels = [part[: LABEL * len(places)] for part, places in zip(parts, self.leaving, strict=True)]
        self._check(torch.cat(labels).view(torch.int64))
        for part, places in zip(parts, self.leaving, strict=True):
            # A copy: bytes from the middle of a buffer may not begin where a number can.
            weights, offset = part[LABEL * len(places) :].clone().view(self.params.dtype), 0
            for first, last in places:
                self.params[first:last] = weights[offset : offset + last - first]
                offset += last - first
        return self.params

    def _check(self, tags: torch.Tensor) -> None:
        if torch.equal(tags, self.slot_tags):
            return
        wrong = int((tags != self.slot_tags).nonzero()[0])
        found, wanted = int(tags[wrong]), int(self.slot_tags[wrong])
        raise CommError(
            f"weights of {_named(found)}, arrived where {_named(wanted)}, was expected (bucket {self.name}); "
            "ranks disagree about the placement; resume from the last checkpoint"
        )

    def segments(self, everything: bool = False) -> Iterator[BucketSegment]:
        """What this rank owns in the terms of checkpoints; `everything`: also replicas that step alone."""
        averaged = self.ownership.reduce == "fedavg"
        for owner, offset in zip(self.owners_here, self.starts[:-1], strict=True):
            if averaged and not everything and owner.rank != self.ownership.placement.primary[owner.expert]:
                continue
            first, last = self.stretch(owner)
            name = f"{self.prefix}experts.{owner.expert}.{self.key}"
            for entry in entries_of(name, self.shape, 0, self.cut):
                start, stop = max(entry.offset, first), min(entry.offset + entry.numel, last)
                if start < stop:
                    yield BucketSegment(
                        entry=entry,
                        start=entry.start + start - entry.offset,
                        offset=offset + start - first,
                        length=stop - start,
                    )

    def digests(self) -> torch.Tensor:
        """A number for the bits of each slot; 0 for empty ones."""
        found = digest_rows(self.rows)
        held = torch.tensor([expert != EMPTY for expert in self.slots], device=found.device, dtype=torch.bool)
        return torch.where(held, found, 0)


def _total(stretches: Iterable[tuple[int, int]]) -> int:
    return sum(last - first for first, last in stretches)


def _run(stretches: list[tuple[int, int]]) -> slice | None:
    """The one stretch that they are together; None where there are gaps, or another order."""
    if any(last != first for (_, last), (first, _) in pairwise(stretches)):
        return None
    return slice(stretches[0][0], stretches[-1][1]) if stretches else slice(0, 0)


def _cut(flat: torch.Tensor, stretches: Iterable[tuple[int, int]]) -> torch.Tensor:
    """A copy of these stretches, one behind the other."""
    return torch.cat([flat[:0], *(flat[first:last] for first, last in stretches)])


def _named(tag: int) -> str:
    return f"expert {tag & 0xFFFFFFFF}, layer {tag >> 48}, part {tag >> 32 & 0xFFFF}"
