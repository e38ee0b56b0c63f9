"""The state of a model as one process would have it: logical experts, gathered from all ranks.

    state = full_state_dict(model)            plain tensors on every rank; collective
    model.load_state_dict(state)              of a model on any ranks: each takes the experts that it has

Replicas count once and moved experts are in their place, so two layouts of one model give the same state.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moeclipse.comm.async_ops.lane import gather
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.experts.module_experts import ModuleExperts
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.shards import ExpertPlace, ExpertShards
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.ops.raw_bytes import as_bytes
from moeclipse.tensor.cut import Cut


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the model inside DDP, where there is one. Collective over all ranks of its layers' meshes."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    layers = {f"{name}." if name else "": layer for name, layer in moe_layers(model)}
    found: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        inside = max((prefix for prefix in layers if key.startswith(prefix)), key=len, default=None)
        layer = None if inside is None else layers[inside]
        if isinstance(value, DTensor):
            found[key] = value.full_tensor()
        elif layer is not None and isinstance(value, ExpertShards):
            found[key] = _gather_shards(layer.mesh, value, key)
        elif layer is None or not (_elsewhere(layer) and key.startswith(f"{inside}experts.")):
            found[key] = value
    for prefix, layer in layers.items():
        if isinstance(layer.experts, ModuleExperts) and _elsewhere(layer):
            found |= _gather_modules(layer, f"{prefix}experts.")
    return found


def _elsewhere(layer: MoE) -> bool:
    """Whether some of its experts are on other ranks, in modules of the user's own."""
    return isinstance(layer.experts, ModuleExperts) and layer.mesh.experts.size > 1


def _gather_shards(mesh: Mesh, mine: ExpertShards, key: str) -> torch.Tensor:
    """A tensor over all experts from the parts of the ranks that share them out."""
    place = mine.place
    cut = None if place.cut is None else vars(place.cut)
    told = mesh.gather_objects((place.experts, cut, mine.local.numel()))
    logical = mine.local.new_zeros(mine.shape)
    parts = _gather_flat(mesh, mine.local, max(size for *_, size in told), key)
    for rank, part in zip(mesh.experts.ranks, parts, strict=True):
        experts, told_cut, size = told[rank]
        theirs = None if told_cut is None else Cut(**{**told_cut, "shape": tuple(told_cut["shape"])})
        where = ExpertPlace(experts=tuple(experts), num_experts=place.num_experts, cut=theirs)
        shape = logical.shape[1:] if theirs is None else theirs.local_shape
        where.put(part[:size].view(len(experts), *shape), logical)
    return logical


def _gather_modules(layer: MoE, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of all modules, in the order of ranks: names and sizes first, then their bytes."""
    mesh, mine = layer.mesh, layer.experts.state_dict(prefix=prefix)
    told = mesh.gather_objects([(key, str(t.dtype), list(t.shape)) for key, t in mine.items()])
    raw = [as_bytes(tensor) for tensor in mine.values()]
    flat = torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8, device=mesh.device)
    sizes = [[_bytes_of(dtype, shape) for _, dtype, shape in rank] for rank in told]
    parts = _gather_flat(mesh, flat, max(map(sum, sizes)), prefix)
    found = {}
    for rank, part in zip(mesh.experts.ranks, parts, strict=True):
        pieces = part[: sum(sizes[rank])].split(sizes[rank])
        for (key, dtype, shape), piece in zip(told[rank], pieces, strict=True):
            found[key] = piece.clone().view(_type_of(dtype)).view(shape)
    return found


def _gather_flat(mesh: Mesh, value: torch.Tensor, length: int, key: str) -> torch.Tensor:
    padded = value.new_zeros(length)
    padded[: value.numel()] = value.flatten()
    return gather(mesh.a2a, mesh.experts, padded, f"gathering of {key}").get()


def _type_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def _bytes_of(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * _type_of(dtype).itemsize
