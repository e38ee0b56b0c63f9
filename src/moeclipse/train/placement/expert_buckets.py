"""Buckets of experts that have replicas or move: slot by slot, after a table of owners.

    launch     each holder sends its slots' gradients to their owners     one uneven exchange
    reduced    the owner adds them up, in the order of ranks
    publish    the owner sends the new weights to all holders, each row behind its expert's number

A bucket holds one parameter of all slots of a layer on this rank ([slots, ...], empty ones included). Its
shard is what this rank owns, expert by expert: not a stretch of the bucket, so master weights are tensors of
their own. `set_ownership` takes another table of owners when experts move; the storage stays where it is.

No process group is made for an expert. With one for each set of holders every rank would have to enter every
new_group in one order at every new placement, and several of them in flight have no order among each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from moeclipse.balance.ownership import Ownership
from moeclipse.balance.placement import EMPTY
from moeclipse.comm.flight.exchange import all_to_all
from moeclipse.comm.flight.in_flight import InFlight, Ready, Then
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.moe.layer import MoE
from moeclipse.ops.precision import wide_of
from moeclipse.tensor.cut import cut_of
from moeclipse.train.buckets import Bucket, BucketEntry, BucketSegment, Content, MainGrad, entries_of
from moeclipse.train.digests import digest_rows

LABEL = 8
"""Bytes in front of each row that is published: layer and expert."""


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
        self.set_ownership(ownership)

    def set_ownership(self, ownership: Ownership) -> None:
        """From now on these are the owners; weights and state are in place, or follow."""
        me = self.group.index
        exchange = ownership.exchange_of(me)
        self.ownership, self.owners_here = ownership, ownership.owned_by(me)
        self.slot_counts, self.owned_counts = list(map(len, exchange.slots)), list(map(len, exchange.owned))
        device = self.params.device

        def tensor(numbers: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(numbers), dtype=torch.int64, device=device)

        self.slots_out = tensor(slot for slots in exchange.slots for slot in slots)
        self.owned_out = tensor(which for owned in exchange.owned for which in owned)
        self.owned_by_peer = [tensor(owned) for owned in exchange.owned]
        self.own_slots = tensor(exchange.own_slots)
        tag = self.layer.layer << 32
        self.slot_tags = tensor(tag + max(expert, 0) for expert in self.slots)[self.slots_out]
        self.owned_tags = tensor(tag + owner.expert for owner in self.owners_here)[self.owned_out]
        # Where no expert has a second holder anywhere, all ranks know it, and nobody sends anything.
        self.quiet = ownership.copies == 1 and all(len(owner.members) == 1 for owner in ownership.owners)
        alone = not any(self.owned_counts) and exchange.own_slots == tuple(range(self.num_slots))
        self.alone = alone and not any(self.slot_counts)

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
        rows = self.grads.view(self.num_slots, self.size)
        if self.quiet:
            self._parts: InFlight[torch.Tensor] = Ready(rows[:0])
            return
        counts = (self.slot_counts, self.owned_counts)
        self._parts = all_to_all(self.mesh.grads, self.group, rows[self.slots_out], *counts, label)

    def reduced(self) -> torch.Tensor:
        """The summed gradients of what this rank owns: the parts of each in the order of ranks."""
        parts = self._parts.get().split(self.owned_counts)
        del self._parts
        grads = self.grads.view(self.num_slots, self.size)
        if self.alone:
            return grads.flatten()
        total = grads.new_zeros(len(self.owners_here), self.size)
        for peer, (owned, part) in enumerate(zip(self.owned_by_peer, parts, strict=True)):
            if peer == self.group.index:
                total += grads[self.own_slots]
            elif len(owned):
                total[owned] += part
        return total.flatten()

    def weights(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of the weights this rank owns."""
        return self.rows[self.own_slots].to(dtype or wide_of(self.params.dtype)).flatten()

    @property
    def rounded(self) -> torch.Tensor | None:
        return None  # what this rank owns is no stretch of the bucket

    def store(self, weight: torch.Tensor) -> None:
        self.rows[self.own_slots] = weight.view(-1, self.size).to(self.params.dtype)

    def publish(self) -> InFlight[torch.Tensor]:
        """Send the weights of what this rank owns to all ranks that hold it."""
        if self.quiet:
            return Ready(self.params)
        leaving = self.rows[self.own_slots][self.owned_out]
        labelled = torch.cat([_bytes(self.owned_tags[:, None]), _bytes(leaving)], dim=1)
        label = f"weights to replicas, bucket {self.name}"
        counts = (self.owned_counts, self.slot_counts)
        return Then(all_to_all(self.mesh.grads, self.group, labelled, *counts, label), self.install)

    def install(self, arrived: torch.Tensor) -> torch.Tensor:
        """Put published rows into their slots, after a look at whose they are."""
        tags = arrived[:, :LABEL].contiguous().view(torch.int64).flatten()
        if not torch.equal(tags, self.slot_tags):
            wrong = int((tags != self.slot_tags).nonzero()[0])
            found, wanted = int(tags[wrong]), int(self.slot_tags[wrong])
            raise CommError(
                f"weights of expert {found & 0xFFFFFFFF}, layer {found >> 32}, arrived where expert "
                f"{wanted & 0xFFFFFFFF}, layer {wanted >> 32}, was expected (bucket {self.name}); "
                "ranks disagree about the placement; resume from the last checkpoint"
            )
        rows = arrived[:, LABEL:].contiguous().view(self.params.dtype)
        self.rows[self.slots_out] = rows
        return self.params

    def segments(self, everything: bool = False) -> Iterator[BucketSegment]:
        """What this rank owns in the terms of checkpoints; `everything`: also replicas that step alone."""
        for number, owner in enumerate(self.owners_here):
            if not everything and owner.rank != self.ownership.placement.primary[owner.expert]:
                continue
            for entry in self.entries_for(owner.expert, number * self.size):
                yield BucketSegment(entry=entry, start=entry.start, offset=entry.offset, length=entry.numel)

    def entries_for(self, expert: int, offset: int) -> Iterator[BucketEntry]:
        return entries_of(f"{self.prefix}experts.{expert}.{self.key}", self.shape, offset, self.cut)

    def digests(self) -> torch.Tensor:
        """A number for the bits of each slot; 0 for empty ones."""
        found = digest_rows(self.rows)
        held = torch.tensor([expert != EMPTY for expert in self.slots], device=found.device, dtype=torch.bool)
        return torch.where(held, found, 0)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
