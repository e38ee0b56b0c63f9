"""Buckets of experts that have replicas or move: slot by slot, after a table of homes.

    launch     each holder sends its slots' gradients to their owners     one uneven exchange
    reduced    the owner adds them up, in the order of ranks
    publish    the owner sends the new weights to all holders, each row behind its expert's number

A bucket holds one parameter of all slots of a layer on this rank ([slots, ...], empty ones included). Its
shard is what this rank owns, home by home: not a stretch of the bucket, so master weights are tensors of
their own. `settle` takes another table of homes after experts have moved; the storage stays where it is.

No process group is made for an expert. With one for each set of holders every rank would have to enter every
new_group in one order at every new placement, and several of them in flight have no order among each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from moeclipse.balance.homes import Homes
from moeclipse.balance.placement import EMPTY
from moeclipse.comm.flight.exchange import Result, all_to_all
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.moe.layer import MoE
from moeclipse.tensor.cut import cut_of
from moeclipse.train.buckets import Bucket, BucketEntry, BucketSegment, Content, entries_of

LABEL = 8
"""Bytes in front of each row that is published: layer and expert."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
MIXER = 0x9E3779B97F4A7C15 - (1 << 64)


class ExpertBucket(Bucket):
    """Parameter `key` of the experts of `layer` on this rank; `prefix` leads to its name in checkpoints."""

    def __init__(self, parameter: nn.Parameter, prefix: str, layer: MoE, key: str, homes: Homes, mesh: Mesh):
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
        super().__init__(content, mesh)
        self.settle(homes)

    def settle(self, homes: Homes) -> None:
        """From now on these are the homes; weights and state are in place, or follow."""
        me = self.group.index
        ties = homes.ties(me)
        self.homes, self.here = homes, homes.owned(me)
        self.slot_counts, self.home_counts = (list(map(len, rows)) for rows in (ties.slots, ties.homes))
        device = self.params.device

        def index(rows: Sequence[int]) -> torch.Tensor:
            return torch.tensor(list(rows), dtype=torch.int64, device=device)

        self.slots_out = index([slot for rows in ties.slots for slot in rows])
        self.homes_out = index([home for rows in ties.homes for home in rows])
        self.homes_by_place = [index(rows) for rows in ties.homes]
        self.own_slots, self.own_homes = index(ties.own_slots), index(ties.own_homes)
        ids = homes.placement.slots[me % homes.placement.num_ranks]
        tag = self.layer.layer << 32
        self.slot_tags = index([tag + max(expert, 0) for expert in ids])[self.slots_out]
        self.home_tags = index([tag + home.expert for home in self.here])[self.homes_out]
        # Where no expert has a second holder anywhere, all ranks know it, and nobody sends anything.
        self.quiet = homes.copies == 1 and all(len(home.members) == 1 for home in homes.homes)
        alone = not any(self.home_counts) and ties.own_slots == tuple(range(self.num_slots))
        self.alone = alone and not any(self.slot_counts)

    @property
    def rows(self) -> torch.Tensor:
        return self.params.view(self.num_slots, self.size)

    def launch(self) -> None:
        label = f"reduction of gradients, bucket {self.name}"
        rows = self.grads.view(self.num_slots, self.size)
        if self.quiet:
            self._parts = Result(rows[:0])
            return
        counts = (self.slot_counts, self.home_counts)
        self._parts = all_to_all(self.mesh.grads, self.group, rows[self.slots_out], *counts, label)

    def reduced(self) -> torch.Tensor:
        """The summed gradients of what this rank owns: of each home, the parts in the order of ranks."""
        parts = self._parts.get().split(self.home_counts)
        del self._parts
        grads = self.grads.view(self.num_slots, self.size)
        if self.alone:
            return grads.flatten()
        total = grads.new_zeros(len(self.here), self.size)
        for place, (homes, part) in enumerate(zip(self.homes_by_place, parts, strict=True)):
            if place == self.group.index:
                total[self.own_homes] += grads[self.own_slots]
            elif len(homes):
                total[homes] += part
        return total.flatten()

    def weights(self) -> torch.Tensor:
        """A copy of the weights this rank owns, in the type of the optimizer."""
        return self.rows[self.own_slots].to(self.grads.dtype).flatten()

    def store(self, weight: torch.Tensor) -> None:
        self.rows[self.own_slots] = weight.view(-1, self.size).to(self.params.dtype)

    def publish(self) -> Result:
        """Send the weights of what this rank owns to all ranks that hold it."""
        if self.quiet:
            return Result(self.params)
        owned = self.rows[self.own_slots][self.homes_out]  # in the order of homes
        labelled = torch.cat([_bytes(self.home_tags[:, None]), _bytes(owned)], dim=1)
        label = f"weights to replicas, bucket {self.name}"
        counts = (self.home_counts, self.slot_counts)
        return _Landing(all_to_all(self.mesh.grads, self.group, labelled, *counts, label), self)

    def land(self, arrived: torch.Tensor) -> None:
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

    def segments(self, everything: bool = False) -> Iterator[BucketSegment]:
        """What this rank owns in the terms of checkpoints; `everything`: also replicas that step alone."""
        for number, home in enumerate(self.here):
            if not everything and home.rank != self.homes.placement.primary[home.expert]:
                continue
            for entry in self.entries_for(home.expert, number * self.size):
                yield BucketSegment(entry=entry, start=entry.start, place=entry.offset, length=entry.numel)

    def entries_for(self, expert: int, offset: int) -> Iterator[BucketEntry]:
        return entries_of(f"{self.prefix}experts.{expert}.{self.key}", self.shape, offset, self.cut)

    def digests(self) -> torch.Tensor:
        """A number for the bits of each slot; 0 for empty ones."""
        bits = self.rows.view(BITS[self.params.element_size()]).to(torch.int64)
        place = torch.arange(1, self.size + 1, device=bits.device)
        mixed = (bits + place) * ((place * MIXER) | 1)
        found = (mixed ^ (mixed >> 29)).sum(1)
        ids = self.homes.placement.slots[self.group.index % self.homes.placement.num_ranks]
        held = torch.tensor([expert != EMPTY for expert in ids], device=found.device, dtype=torch.bool)
        return torch.where(held, found, 0)


class _Landing(Result):
    """Published rows on their way; `get` puts them into place."""

    def __init__(self, rows: Result, bucket: ExpertBucket) -> None:
        self._rows, self._bucket = rows, bucket

    def get(self) -> torch.Tensor:
        self._bucket.land(self._rows.get())
        return self._bucket.params


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
