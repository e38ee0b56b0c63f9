"""What goes into which bucket: the model's parameters from last to first, cut where ranks share them.

Dense parameters of one kind fill a bucket up to a size; experts have one for each stacked tensor. Every
parameter's logical entries (a dense tensor, or one expert of a stacked tensor) are known by name, so a shard
can be saved and loaded piece by piece under any layout (`train/optim/buckets`).

Contract: all ranks that share a bucket find the same contents in the same order. With `by_layer` a bucket
ends where its layer does, so that a layer can be clipped and updated by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import nn

from moeclipse.balance.placement import primary_bounds
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.ops.precision import WIDE
from moeclipse.tensor.cut import Cut, Share, cut_of, share_of
from moeclipse.train.optim.column_shards import ColumnShard
from moeclipse.train.optim.quant_blocks import block_for


class MadeBucket(Protocol):
    """A bucket that somebody else makes; it is told how fast it learns, and its blocks."""

    lr_factor: float
    block: int


Made = TypeVar("Made", bound=MadeBucket)


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
    layer: str = ""
    """Which layer its parameters belong to, where buckets end with layers (`layer_of`)."""


Kind = tuple[bool, Share, bool, bool, float, int, str]
"""Of what is bucketed together: whether it decays, how tp ranks share it, whether it is no copy, is frozen;
how much faster it learns, its blocks, its type (and of bytes which part of a matrix they are)."""


def contents(
    model: nn.Module,
    mesh: Mesh,
    bucket_mb: float,
    make_expert_bucket: Callable[[nn.Parameter, str, MoE, str], Made | None] | None = None,
    lr_factor: Callable[[str], float] = lambda _: 1.0,
    blocks: bool = False,
    by_layer: bool = False,
) -> Iterator[Content | Made]:
    """The model's parameters from last to first, in buckets; experts each stacked tensor for itself."""
    found = _contents(model, mesh, bucket_mb, make_expert_bucket, lr_factor, blocks, by_layer)
    for layer, content in found:
        yield replace(content, layer=layer) if isinstance(content, Content) else content


def layer_of(name: str) -> str:
    """Of a parameter: `layers.3`, `embedding`, or `head` with the norm before it."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}"
    return first if first == "embedding" else "head"


def _contents(
    model: nn.Module,
    mesh: Mesh,
    bucket_mb: float,
    make_expert_bucket: Callable[[nn.Parameter, str, MoE, str], Made | None] | None,
    lr_factor: Callable[[str], float],
    blocks: bool,
    by_layer: bool,
) -> Iterator[tuple[str, Content | Made]]:
    """Each with its layer, where buckets end with layers."""
    layers = {
        id(p): (name, layer, key)
        for name, layer in moe_layers(model)
        for key, p in layer.experts.named_parameters()
    }
    limit = bucket_mb * 2**20
    open_buckets: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    number, layer = 0, ""
    for name, parameter in reversed(list(model.named_parameters())):
        if by_layer and layer_of(name) != layer:
            for kind in sorted(open_buckets):
                yield layer, dense_content(f"dense.{number}", open_buckets.pop(kind), kind, mesh)
                number += 1
            layer = layer_of(name)
        trained, factor = parameter.requires_grad, lr_factor(name)
        if id(parameter) in layers:
            where = layers[id(parameter)]
            bucket = None if make_expert_bucket is None else make_expert_bucket(parameter, *where)
            block = block_for(parameter, parameter.dim() - 1) if blocks else 0
            if bucket is not None:
                bucket.lr_factor, bucket.block = factor, block
            yield layer, bucket or expert_content(parameter, *where, mesh, factor, block)
            continue
        share = share_of(parameter) if mesh.tp > 1 else "sum"
        block = block_for(parameter, parameter.dim()) if blocks and trained else 0
        owned = not getattr(parameter, "is_copy", False)
        # Codes of matrices in few bits are whole words, and begin at one among themselves (`ops/frozen`).
        part = "" if parameter.is_floating_point() else name.rpartition(".")[2]
        kind = (parameter.dim() > 1, share, owned, not trained, factor, block, f"{parameter.dtype} {part}")
        (members := open_buckets.setdefault(kind, [])).append((name, parameter))
        if sum(logical_bytes(p) for _, p in members) >= limit:
            yield layer, dense_content(f"dense.{number}", open_buckets.pop(kind), kind, mesh)
            number += 1
    for kind in sorted(open_buckets):
        yield layer, dense_content(f"dense.{number}", open_buckets[kind], kind, mesh)
        number += 1


def logical_bytes(parameter: nn.Parameter) -> int:
    """Of the whole gradient: parts may differ from rank to rank, but buckets must end at the same place."""
    cut = cut_of(parameter)
    numel = parameter.numel() if cut is None else math.prod(cut.shape)
    return numel * WIDE[parameter.dtype].itemsize


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
