"""Flat buffers: parameters and their gradients in buckets, each cut into one shard per rank.

A bucket's parameters are views into one flat tensor and their `main_grad`s views into another, so a
reduction is one collective and an update is one pass over a shard. There are two kinds:

    dense     shared by all ranks; equal shards, wherever they fall (ZeRO-1)
    experts   shared by the ranks that hold copies; shards are whole experts, and the rank that owns one is
              the expert's primary: its optimizer state lives there and nowhere else

Buckets are reduced in one fixed order on all ranks, from the last layer to the first, each as soon as
backward has filled it. Every parameter's logical entries (a dense tensor, or one expert of a stacked tensor)
are known by name, so a shard can be saved and loaded piece by piece under any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from moeclipse.balance.placement import primary_bounds
from moeclipse.comm.exchange import RankSum, Result, all_gather_shards, reduce_scatter
from moeclipse.comm.mesh import Group, Mesh
from moeclipse.moe.layer import MoE
from moeclipse.moe.standalone import moe_layers
from moeclipse.tensor.weight_grad import attach, main_grad_dtype


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A logical tensor inside a bucket: elements offset .. offset + numel."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of a logical tensor that lies in this rank's shard."""

    entry: Entry
    start: int
    """First element, counted inside the logical tensor."""
    place: int
    """The same element, counted inside the shard."""
    length: int


@dataclass(frozen=True, kw_only=True)
class Content:
    """What goes into one bucket."""

    name: str
    parameters: list[nn.Parameter]
    entries: list[Entry]
    bounds: list[int]
    group: Group
    decay: bool


class Bucket:
    def __init__(self, content: Content, mesh: Mesh) -> None:
        self.name, self.entries, self.bounds = content.name, content.entries, content.bounds
        self.group, self.decay, self.mesh = content.group, content.decay, mesh
        first = content.parameters[0]
        self.params = torch.zeros(self.bounds[-1], dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.bounds[-1], dtype=main_grad_dtype(first.dtype), device=first.device)
        self.parameters = content.parameters
        self.missing: set[int] = set()
        self._sum: RankSum | None = None
        offset = 0
        for parameter in content.parameters:
            view = slice(offset, offset + parameter.numel())
            self.params[view] = parameter.data.flatten()
            parameter.data = self.params[view].view(parameter.shape)
            offset = view.stop

    @property
    def shard(self) -> slice:
        return slice(self.bounds[self.group.index], self.bounds[self.group.index + 1])

    def launch(self) -> None:
        label = f"reduction of gradients, bucket {self.name}"
        self._sum = reduce_scatter(self.mesh.grads, self.group, self.grads, self.bounds, label)

    def reduced(self) -> torch.Tensor:
        """This rank's shard of the summed gradient."""
        assert self._sum is not None
        shard, self._sum = self._sum.get(), None
        return shard

    def publish(self) -> Result:
        """Send this rank's shard of the parameters to the ranks that share them."""
        label = f"gather of parameters, bucket {self.name}"
        return all_gather_shards(self.mesh.grads, self.group, self.params, self.bounds, label)

    def segments(self) -> Iterator[Segment]:
        first, last = self.shard.start, self.shard.stop
        for entry in self.entries:
            start, stop = max(entry.offset, first), min(entry.offset + entry.numel, last)
            if start < stop:
                yield Segment(
                    entry=entry, start=start - entry.offset, place=start - first, length=stop - start
                )


class Buckets:
    """All buckets of a model, in the order in which they are reduced."""

    def __init__(self, model: nn.Module, mesh: Mesh, bucket_mb: float) -> None:
        self.buckets = [Bucket(content, mesh) for content in contents(model, mesh, bucket_mb)]
        self._armed = False
        self._next = 0
        for bucket in self.buckets:
            offset = 0
            for index, parameter in enumerate(bucket.parameters):
                main_grad = bucket.grads[offset : offset + parameter.numel()].view(parameter.shape)
                attach(parameter, main_grad, partial(self._ready, bucket, index))
                offset += parameter.numel()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.grads.zero_()

    def arm(self) -> None:
        """From here on, a bucket whose gradients are complete is reduced: the last backward begins."""
        self._armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """Reduce what backward did not touch; afterwards every bucket is on its way."""
        self._armed = False
        for bucket in self.buckets[self._next :]:
            bucket.launch()
        self._next = len(self.buckets)

    def _ready(self, bucket: Bucket, index: int) -> None:
        if not self._armed:
            return
        bucket.missing.discard(index)
        # One order for all ranks, whatever order backward takes here.
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self.buckets[self._next].launch()
            self._next += 1


def contents(model: nn.Module, mesh: Mesh, bucket_mb: float) -> Iterator[Content]:
    """The model's parameters from last to first, in buckets; experts each stacked tensor for itself."""
    layers = {
        id(p): (name, layer, key)
        for name, layer in moe_layers(model)
        for key, p in layer.experts.named_parameters()
    }
    limit = bucket_mb * 2**20
    open_buckets: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    number = 0
    for name, parameter in reversed(list(model.named_parameters())):
        if not parameter.requires_grad:
            continue
        if id(parameter) in layers:
            yield expert_content(parameter, *layers[id(parameter)], mesh)
            continue
        decay = parameter.dim() > 1
        open_buckets[decay].append((name, parameter))
        size = sum(p.numel() * main_grad_dtype(p.dtype).itemsize for _, p in open_buckets[decay])
        if size >= limit:
            yield dense_content(f"dense.{number}", open_buckets[decay], decay, mesh)
            number += 1
            open_buckets[decay] = []
    for decay, members in open_buckets.items():
        if members:
            yield dense_content(f"dense.{number}", members, decay, mesh)
            number += 1


def dense_content(name: str, members: Sequence[tuple[str, nn.Parameter]], decay: bool, mesh: Mesh) -> Content:
    entries, offset = [], 0
    for key, parameter in members:
        entries.append(Entry(name=key, shape=tuple(parameter.shape), offset=offset))
        offset += parameter.numel()
    share = -(-offset // mesh.num_ranks)  # the last shards may reach into padding
    return Content(
        name=name,
        parameters=[parameter for _, parameter in members],
        entries=entries,
        bounds=[rank * share for rank in range(mesh.num_ranks + 1)],
        group=mesh.dense_grads,
        decay=decay,
    )


def expert_content(parameter: nn.Parameter, name: str, layer: MoE, key: str, mesh: Mesh) -> Content:
    """`key` of all experts of this rank: one entry for each logical expert."""
    shape = tuple(parameter.shape[1:])
    size = math.prod(shape)
    prefix = f"{name}." if name else ""
    ids = layer.experts.ids
    return Content(
        name=f"{prefix}experts.{key}",
        parameters=[parameter],
        entries=[
            Entry(name=f"{prefix}experts.{expert}.{key}", shape=shape, offset=slot * size)
            for slot, expert in enumerate(ids)
        ],
        bounds=[bound * size for bound in primary_bounds(len(ids), mesh.dp, layer.layer)],
        group=mesh.replicas,
        decay=True,
    )
