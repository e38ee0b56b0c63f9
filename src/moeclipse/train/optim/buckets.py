"""Flat buffers: parameters and their gradients in buckets, each cut into one shard per rank.

A bucket's parameters are views into one flat tensor and their `main_grad`s views into another, so a
reduction is one collective and an update is one pass over a shard. The kinds:

    dense     shared by all ranks; equal shards, wherever they fall (ZeRO-1)
    same      likewise, where all tp ranks computed the same gradient: that of tp_index 0 counts
    cut       parts of tensors that are cut over tp; shared by the ranks with the same tp_index
    experts   shared by the ranks that hold copies; shards are whole experts, and the rank that owns one is
              the expert's primary: its optimizer state lives there and nowhere else. What is whole on every
              tp rank though experts are sharded (adapters have such parts) is shared by all of these, too

So every element of every logical tensor lies in exactly one rank's shard. Parameters that want no gradient
are in buckets of their own, which are saved, read and sent out like others and never reduced.

Buckets are reduced in one fixed order on all ranks, from the last layer to the first, each as soon as
backward has filled it. Which parameters go into which bucket is told by `train/optim/bucket_contents`.

Where gradients come once a step, layers may share memory for them (`turns`): some buffers that they take in
turn, if each layer is updated as soon as its gradients are there, or these leave for the host
(`train/optim/host_grads`). A gradient that comes before the one that lay there was used raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from moeclipse.comm.async_ops.lane import InFlight, Ready
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.collectives import SMALL_BYTES, PeerUse, collectives
from moeclipse.core.errors import ScheduleError
from moeclipse.moe.layer import MoE
from moeclipse.ops.precision import WIDE
from moeclipse.tensor.weight_grad import Accumulation, attach, begin
from moeclipse.train.optim.bucket_contents import BucketEntry, Content, contents

MainGrad = Literal["fp32", "bf16"]
TURNS = 2
"""Buffers that layers share for gradients: one is read by an update while the next is filled."""


def summed_type(main_grad: MainGrad, held: torch.dtype) -> torch.dtype:
    """In which gradients of such weights add up."""
    return WIDE[held] if main_grad == "fp32" else torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class BucketSegment:
    """The part of a logical tensor that lies in this rank's shard."""

    entry: BucketEntry
    start: int
    """First element, counted inside the logical tensor."""
    offset: int
    """The same element, counted inside the shard."""
    length: int


@dataclass(frozen=True, kw_only=True)
class Lent:
    """Memory of parameters that lie on the host and visit the device (`train/step/host_weights`)."""

    number: int
    """Of their layer, among those that do."""
    visiting: torch.Tensor
    """On the device, where others' lie in turn ..."""
    held: torch.Tensor
    """... and on the host."""


class Bucket:
    def __init__(
        self,
        content: Content,
        mesh: Mesh,
        peer: PeerUse = "off",
        main_grad: MainGrad = "fp32",
        grads: torch.Tensor | None = None,
        lent: Lent | None = None,
    ) -> None:
        """`grads`: memory for gradients that others use, too. `lent`: memory that its parameters lie in."""
        self.name, self.entries, self.bounds = content.name, content.entries, content.bounds
        self.group, self.decay, self.lr_factor, self.mesh = (
            content.group,
            content.decay,
            content.lr_factor,
            mesh,
        )
        self.contributes, self.owned, self.block = content.contributes, content.owned, content.block
        self.shared = content.group.size > 1
        """Whether other ranks have some of it, too: new weights are told."""
        first = content.parameters[0]
        self.frozen = not first.requires_grad
        peer = "off" if self.frozen else peer
        self.wire = collectives(mesh, content.group, mesh.grads, peer, max_bytes=SMALL_BYTES)
        self.lent = lent
        self.params = (
            torch.zeros(self.bounds[-1], dtype=first.dtype, device=first.device)
            if lent is None
            else lent.visiting
        )
        self.narrow = first.dtype != WIDE[first.dtype]
        """Whether updates compute in a wider type."""
        # Not cleared: a step begins with `Buckets.zero`, and its first gradients are stored.
        dtype = summed_type(main_grad, first.dtype)
        size = 0 if self.frozen else self.bounds[-1]
        shape: dict[str, Any] = {"dtype": dtype, "device": first.device}
        self.grads = torch.empty(size, **shape) if grads is None else grads
        self.layer_name, self.host_bytes = content.layer, 0.0
        self.waits_for: Bucket | None = None
        """Whose gradients lie in the same memory before its own."""
        self.parameters = content.parameters
        self.sums: list[Accumulation] = []
        """Of its parameters, once they have been attached."""
        self.missing: set[Accumulation] = set()
        """Those of them whose gradients are still to come."""
        self.quiet = False
        """Nobody has anything to send of it."""
        self._sum: InFlight[torch.Tensor] | None = None
        offset = 0
        for parameter in content.parameters if lent is None else ():
            view = slice(offset, offset + parameter.numel())
            self.params[view] = parameter.data.flatten()
            parameter.data = self.params[view].view(parameter.shape)
            offset = view.stop
        if not self.frozen and lent is None:  # whose parameters fill it
            self.grads[offset:] = 0

    @property
    def shard(self) -> slice:
        return slice(self.bounds[self.group.index], self.bounds[self.group.index + 1])

    def launch(self) -> None:
        if not self.contributes:
            self.grads.zero_()
        if not self.shared:
            self._sum = Ready(self.grads)
            return
        label = f"reduction of gradients, bucket {self.name}"
        self._sum = self.wire.reduce_scatter(self.grads, self.bounds, label)

    def reduced(self) -> torch.Tensor:
        """This rank's shard of the summed gradient."""
        summed, self._sum = self._sum, None
        assert summed is not None
        return summed.get() if self.shared else self.grads

    def weights(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's shard of the parameters in this or a wide type: themselves, or a copy.

        Between steps, that is: where they are read then.
        """
        return self.at_rest[self.shard].to(dtype or WIDE[self.params.dtype])

    @property
    def at_rest(self) -> torch.Tensor:
        """The parameters between steps."""
        return self.params if self.lent is None else self.lent.held

    @property
    def rounded(self) -> torch.Tensor | None:
        """Where an update may write the new weights, rounded; None: that is left to `store`."""
        return self.params[self.shard] if self.narrow else None

    def store(self, weight: torch.Tensor) -> None:
        """Round weights to the parameters' type, where these are not the same tensor."""
        if weight.dtype != self.params.dtype:
            self.at_rest[self.shard] = weight.to(self.params.dtype)

    def publish(self) -> InFlight[torch.Tensor]:
        """Send this rank's shard of the parameters to the ranks that share them."""
        if self.group.size == 1:
            return Ready(self.params)
        label = f"gather of parameters, bucket {self.name}"
        return self.wire.all_gather_shards(self.params, self.bounds, label)

    def segments(self, everything: bool = False) -> Iterator[BucketSegment]:
        """This rank's part of each logical tensor; `everything`: also what a checkpoint has from others."""
        if not (self.owned or everything):
            return
        first, last = self.shard.start, self.shard.stop
        for entry in self.entries:
            start, stop = max(entry.offset, first), min(entry.offset + entry.numel, last)
            if start < stop:
                yield BucketSegment(
                    entry=entry,
                    start=entry.start + start - entry.offset,
                    offset=start - first,
                    length=stop - start,
                )


MakeExpertBucket = Callable[[nn.Parameter, str, MoE, str], Bucket | None]


class SharedGrads:
    """Memory for gradients that the buckets of different layers take in turn; those of one never share it."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._made: dict[tuple[object, ...], list[Bucket]] = {}
        self._here: tuple[str, list[tuple[object, ...]]] = ("", [])

    def of(self, content: Content) -> tuple[torch.Tensor | None, Bucket | None]:
        """(memory that is there already, whose gradients lie in it before), or nothing."""
        earlier = self._made.get(self._key(content.layer, content.bounds[-1], content.parameters[0]), [])
        if len(earlier) < self._turns or not content.parameters[0].requires_grad:
            return None, None
        return earlier[-self._turns].grads, earlier[-self._turns]

    def took(self, bucket: Bucket) -> None:
        if not bucket.frozen and bucket.layer_name.startswith("layers."):
            key = self._key(bucket.layer_name, bucket.bounds[-1], bucket.parameters[0])
            self._made.setdefault(key, []).append(bucket)
            layer, keys = self._here
            self._here = (bucket.layer_name, [*(keys if layer == bucket.layer_name else []), key])

    def _key(self, layer: str, size: int, first: nn.Parameter) -> tuple[object, ...]:
        """Buckets of one size, each with those of its place in other layers."""
        here, keys = self._here
        like = (size, first.dtype)
        place = sum(key[:2] == like for key in keys) if here == layer else 0
        return (*like, place)


class Buckets:
    """All buckets of a model, in the order in which they are reduced."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        bucket_mb: float,
        peer: PeerUse = "off",
        make_expert_bucket: MakeExpertBucket | None = None,
        main_grad: MainGrad = "fp32",
        lr_factor: Callable[[str], float] = lambda _: 1.0,
        blocks: bool = False,
        by_layer: bool = False,
        turns: int = 0,
        grads_leave: bool = False,
        lent_to: Callable[[nn.Parameter], Lent | None] = lambda _: None,
    ) -> None:
        """`peer`: small buckets are reduced through peer memory, where that applies.

        `make_expert_bucket` makes the buckets of experts that move or have replicas, `lr_factor` tells by
        name how fast a parameter learns. `blocks`: shards are cut between blocks (`ops/eight_bits`).
        `by_layer`: buckets end with layers; `turns`: which share so many buffers for gradients then, 0: none;
        `grads_leave`: these are on the host before others take their place. `lent_to`: memory of parameters
        that have some already; each is a bucket.
        """
        self.grads_leave = grads_leave
        made: list[Bucket] = []
        memory = SharedGrads(turns) if turns else None
        for content in contents(model, mesh, bucket_mb, make_expert_bucket, lr_factor, blocks, by_layer):
            if isinstance(content, Bucket):
                made.append(content)
                continue
            grads, before = (None, None) if memory is None else memory.of(content)
            made.append(Bucket(content, mesh, peer, main_grad, grads, lent_to(content.parameters[0])))
            made[-1].waits_for = before
            if memory is not None:
                memory.took(made[-1])
        self.buckets = [bucket for bucket in made if not bucket.frozen]
        self.frozen = [bucket for bucket in made if bucket.frozen]
        """Of parameters that are not trained; no part of a step."""
        self._later: dict[str, list[Bucket]] = {}
        """By layer: the buckets whose gradients take the memory of its gradients."""
        for bucket in self.buckets:
            before = bucket.waits_for
            while before is not None:
                self._later.setdefault(before.layer_name, []).append(bucket)
                before = before.waits_for
        self.on_reduce: Callable[[int], None] | None = None
        """Told of each bucket whose reduction was launched."""
        self._armed = self._placed = False
        self._next = 0
        for bucket in self.buckets:
            offset, ready = 0, partial(self._ready, bucket)
            for parameter in bucket.parameters:
                place = bucket.grads[offset : offset + parameter.numel()].view(parameter.shape)
                bucket.sums.append(attach(parameter, place, ready, bucket.missing))
                offset += parameter.numel()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def zero(self) -> None:
        """All gradients are zero from here on; no memory is touched (`tensor/weight_grad`)."""
        for bucket in self.buckets:
            for state in bucket.sums:
                state.empty = True

    def arm(self, backwards: int = 1, *, placed: bool = False) -> None:
        """From here on, a bucket whose gradients are complete is reduced: so many backwards are to come.

        `placed`: where a program says so (`reduce`), and not before.
        """
        self._armed, self._placed, self._next = True, placed, 0
        begin([state for bucket in self.buckets for state in bucket.sums], backwards)
        for bucket in self.buckets:
            bucket.missing.update(bucket.sums)

    def reduced(self) -> list[torch.Tensor]:
        """This rank's shards of the summed gradients, in the order of buckets."""
        return [bucket.reduced() for bucket in self.buckets]

    def finish(self) -> None:
        """Reduce what backward did not touch; afterwards every bucket is on its way."""
        while self._next < len(self.buckets):
            self._launch_next()
        self._armed = False

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next]
        for other in self._later.get(bucket.layer_name, ()):
            if self._armed and len(other.missing) < len(other.sums):
                raise ScheduleError(
                    f"a gradient of {other.name} came before {bucket.layer_name} was updated, whose memory "
                    "it takes; set optim.clip = 'global' and memory.main_grad = 'device'"
                )
        for state in bucket.sums:
            if state.empty:
                state.fill()
        bucket.missing.clear()
        bucket.launch()
        self._next += 1
        if self.on_reduce is not None:
            self.on_reduce(self._next - 1)

    def reduce(self, number: int) -> None:
        """All gradients of this bucket are there: what a program says of its next one."""
        assert number == self._next, f"bucket {number} is reduced before bucket {self._next}"
        self._launch_next()

    def _ready(self, bucket: Bucket) -> None:
        """All of its gradients are there."""
        if not self._armed:
            return
        if self._placed:
            late = bucket in self.buckets[: self._next]
            assert not late, f"a gradient of bucket {bucket.name} came after its reduction"
            return
        # One order for all ranks, whatever order backward takes here.
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch_next()
