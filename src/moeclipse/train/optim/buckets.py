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
backward has filled it. Every parameter's logical entries (a dense tensor, or one expert of a stacked tensor)
are known by name, so a shard can be saved and loaded piece by piece under any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from moeclipse.balance.placement import primary_bounds
from moeclipse.comm.async_ops.in_flight import InFlight
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.collectives import SMALL_BYTES, PeerUse, collectives
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.ops.precision import wide_of
from moeclipse.tensor.cut import Cut, Share, cut_of, share_of
from moeclipse.tensor.weight_grad import Accumulation, attach
from moeclipse.train.optim.column_shards import ColumnShard
from moeclipse.train.optim.quant_blocks import block_for

MainGrad = Literal["fp32", "bf16"]


def summed_type(main_grad: MainGrad, held: torch.dtype) -> torch.dtype:
    """In which gradients of such weights add up."""
    return wide_of(held) if main_grad == "fp32" else torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class BucketEntry:
    """Part of a logical tensor, as checkpoints know it: elements offset .. offset + numel of a bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    start: int = 0
    """Its first element, counted inside the logical tensor."""
    length: int | None = None
    """Left out: the tensor is here whole."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape) if self.length is None else self.length


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
class Content:
    """What goes into one bucket."""

    name: str
    parameters: list[nn.Parameter]
    entries: list[BucketEntry]
    bounds: list[int]
    group: Group
    decay: bool
    lr_factor: float = 1.0
    owned: bool = True
    """Not a copy of another stage's parameters, which counts and saves them."""
    contributes: bool = True
    """Whether this rank's gradients count: where tp ranks computed the same, one of them does."""
    block: int = 0
    """Its tensors, and so its shards, are cut between blocks of so many elements; 0: anywhere."""


class Bucket:
    def __init__(
        self, content: Content, mesh: Mesh, peer: PeerUse = "off", main_grad: MainGrad = "fp32"
    ) -> None:
        self.name, self.entries, self.bounds = content.name, content.entries, content.bounds
        self.group, self.decay, self.lr_factor, self.mesh = (
            content.group,
            content.decay,
            content.lr_factor,
            mesh,
        )
        self.contributes, self.owned, self.block = content.contributes, content.owned, content.block
        first = content.parameters[0]
        self.frozen = not first.requires_grad
        peer = "off" if self.frozen else peer
        self.wire = collectives(mesh, content.group, mesh.grads, peer, max_bytes=SMALL_BYTES)
        self.params = torch.zeros(self.bounds[-1], dtype=first.dtype, device=first.device)
        # Not cleared: a step begins with `Buckets.zero`, and its first gradients are stored.
        dtype = summed_type(main_grad, first.dtype)
        size = 0 if self.frozen else self.bounds[-1]
        self.grads = torch.empty(size, dtype=dtype, device=first.device)
        self.parameters = content.parameters
        self.missing: set[int] = set()
        self.sums: list[Accumulation] = []
        """Of its parameters, once they have been attached."""
        self.quiet = False
        """Nobody has anything to send of it."""
        self._sum: InFlight[torch.Tensor] | None = None
        offset = 0
        for parameter in content.parameters:
            view = slice(offset, offset + parameter.numel())
            self.params[view] = parameter.data.flatten()
            parameter.data = self.params[view].view(parameter.shape)
            offset = view.stop
        if not self.frozen:
            self.grads[offset:] = 0

    @property
    def shard(self) -> slice:
        return slice(self.bounds[self.group.index], self.bounds[self.group.index + 1])

    def launch(self) -> None:
        label = f"reduction of gradients, bucket {self.name}"
        if not self.contributes:
            self.grads.zero_()
        self._sum = self.wire.reduce_scatter(self.grads, self.bounds, label)

    def reduced(self) -> torch.Tensor:
        """This rank's shard of the summed gradient."""
        assert self._sum is not None
        shard, self._sum = self._sum.get(), None
        return shard

    def weights(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's shard of the parameters in this or a wide type: themselves, or a copy."""
        return self.params[self.shard].to(dtype or wide_of(self.params.dtype))

    @property
    def rounded(self) -> torch.Tensor | None:
        """Where an update may write the new weights, rounded; None: that is left to `store`."""
        return None if self.params.dtype == wide_of(self.params.dtype) else self.params[self.shard]

    def store(self, weight: torch.Tensor) -> None:
        """Round updated weights to the parameters' type, where these are not the same tensor."""
        if weight.dtype != self.params.dtype:
            self.params[self.shard] = weight.to(self.params.dtype)

    def publish(self) -> InFlight[torch.Tensor]:
        """Send this rank's shard of the parameters to the ranks that share them."""
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
    ) -> None:
        """`peer`: small buckets are reduced through peer memory, where that applies.

        `make_expert_bucket` makes the buckets of experts that move or have replicas, `lr_factor` tells by
        name how fast a parameter learns. `blocks`: shards are cut between blocks (`ops/eight_bits`).
        """
        made = [
            content if isinstance(content, Bucket) else Bucket(content, mesh, peer, main_grad)
            for content in contents(model, mesh, bucket_mb, make_expert_bucket, lr_factor, blocks)
        ]
        self.buckets = [bucket for bucket in made if not bucket.frozen]
        self.frozen = [bucket for bucket in made if bucket.frozen]
        """Of parameters that are not trained; no part of a step."""
        self._armed = self._placed = False
        self._next = 0
        for bucket in self.buckets:
            offset = 0
            for index, parameter in enumerate(bucket.parameters):
                place = bucket.grads[offset : offset + parameter.numel()].view(parameter.shape)
                bucket.sums.append(attach(parameter, place, partial(self._ready, bucket, index)))
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
        for bucket in self.buckets:
            for state in bucket.sums:
                state.begin(backwards)
            bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """Reduce what backward did not touch; afterwards every bucket is on its way."""
        self._armed = False
        while self._next < len(self.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next]
        for state in bucket.sums:
            state.fill()
        bucket.launch()
        self._next += 1

    def reduce(self, number: int) -> None:
        """All gradients of this bucket are there: what a program says of its next one."""
        assert number == self._next, f"bucket {number} is reduced before bucket {self._next}"
        self._launch_next()

    def _ready(self, bucket: Bucket, index: int) -> None:
        if not self._armed:
            return
        bucket.missing.discard(index)
        if self._placed:
            late = bucket in self.buckets[: self._next]
            assert not late, f"a gradient of bucket {bucket.name} came after its reduction"
            return
        # One order for all ranks, whatever order backward takes here.
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch_next()


Kind = tuple[bool, Share, bool, bool, float, int, str]
"""Of what is bucketed together: whether it decays, how tp ranks share it, whether it is no copy, is frozen;
how much faster it learns, its blocks, its type (and of bytes which part of a matrix they are)."""
MakeExpertBucket = Callable[[nn.Parameter, str, MoE, str], Bucket | None]


def contents(
    model: nn.Module,
    mesh: Mesh,
    bucket_mb: float,
    make_expert_bucket: MakeExpertBucket | None = None,
    lr_factor: Callable[[str], float] = lambda _: 1.0,
    blocks: bool = False,
) -> Iterator[Content | Bucket]:
    """The model's parameters from last to first, in buckets; experts each stacked tensor for itself."""
    layers = {
        id(p): (name, layer, key)
        for name, layer in moe_layers(model)
        for key, p in layer.experts.named_parameters()
    }
    limit = bucket_mb * 2**20
    open_buckets: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    number = 0
    for name, parameter in reversed(list(model.named_parameters())):
        trained, factor = parameter.requires_grad, lr_factor(name)
        if id(parameter) in layers:
            where = layers[id(parameter)]
            bucket = None if make_expert_bucket is None else make_expert_bucket(parameter, *where)
            block = block_for(parameter, parameter.dim() - 1) if blocks else 0
            if bucket is not None:
                bucket.lr_factor, bucket.block = factor, block
            yield bucket or expert_content(parameter, *where, mesh, factor, block)
            continue
        share = share_of(parameter) if mesh.tp > 1 else "sum"
        block = block_for(parameter, parameter.dim()) if blocks and trained else 0
        owned = not getattr(parameter, "is_copy", False)
        # Codes of matrices in few bits are whole words, and begin at one among themselves (`ops/frozen`).
        part = "" if parameter.is_floating_point() else name.rpartition(".")[2]
        kind = (parameter.dim() > 1, share, owned, not trained, factor, block, f"{parameter.dtype} {part}")
        (members := open_buckets.setdefault(kind, [])).append((name, parameter))
        if sum(logical_bytes(p) for _, p in members) >= limit:
            yield dense_content(f"dense.{number}", open_buckets.pop(kind), kind, mesh)
            number += 1
    for kind in sorted(open_buckets):
        yield dense_content(f"dense.{number}", open_buckets[kind], kind, mesh)
        number += 1


def logical_bytes(parameter: nn.Parameter) -> int:
    """Of the whole gradient: parts may differ from rank to rank, but buckets must end at the same place."""
    cut = cut_of(parameter)
    numel = parameter.numel() if cut is None else math.prod(cut.shape)
    return numel * wide_of(parameter.dtype).itemsize


def dense_content(
    name: str,
    members: Sequence[tuple[str, nn.Parameter]],
    kind: Kind,
    mesh: Mesh,
) -> Content:
    decay, share, owned, _, factor, block, _ = kind
    entries, offset = list[BucketEntry](), 0
    for key, parameter in members:
        entries += entries_of(key, tuple(parameter.shape), offset, cut_of(parameter))
        offset += parameter.numel()
    group = mesh.cut_grads if share == "cut" else mesh.dense_grads
    unit = max(block, 1)
    portion = -(-offset // (group.size * unit)) * unit  # the last shards may reach into padding
    return Content(
        name=name,
        parameters=[parameter for _, parameter in members],
        entries=entries,
        bounds=[rank * portion for rank in range(group.size + 1)],
        group=group,
        decay=decay,
        lr_factor=factor,
        owned=owned,
        contributes=share != "same" or mesh.tp_index == 0,
        block=block,
    )


def entries_of(name: str, shape: tuple[int, ...], offset: int, cut: Cut | None) -> Iterator[BucketEntry]:
    """A local tensor in the terms of the logical one: whole, runs of its rows, or some of its columns."""
    if cut is None or cut.local_shape == cut.shape:
        yield BucketEntry(name=name, shape=shape, offset=offset)
    elif cut.columns is not None:
        yield BucketEntry(name=ColumnShard(name, *cut.columns).key, shape=shape, offset=offset)
    else:
        logical = (*shape[: len(shape) - len(cut.shape)], *cut.shape)  # a stack of one keeps its first 1
        for start, length in cut.runs:
            yield BucketEntry(name=name, shape=logical, offset=offset, start=start, length=length)
            offset += length


def expert_content(
    parameter: nn.Parameter,
    name: str,
    layer: MoE,
    key: str,
    mesh: Mesh,
    lr_factor: float = 1.0,
    block: int = 0,
) -> Content:
    """`key` of all experts of this rank, each an expert of its own to checkpoints."""
    shape = tuple(parameter.shape[1:])
    size = math.prod(shape)
    prefix = f"{name}." if name else ""
    ids = layer.experts.ids
    cut = cut_of(parameter)
    group = mesh.expert_grads() if layer.sharded and cut is None else mesh.replicas
    return Content(
        name=f"{prefix}experts.{key}",
        parameters=[parameter],
        entries=[
            entry
            for slot, expert in enumerate(ids)
            for entry in entries_of(f"{prefix}experts.{expert}.{key}", shape, slot * size, cut)
        ],
        bounds=[bound * size for bound in primary_bounds(len(ids), group.size, layer.layer)],
        group=group,
        decay=True,
        lr_factor=lr_factor,
        block=block,
    )
