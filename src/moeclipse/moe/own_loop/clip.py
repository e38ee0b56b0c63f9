"""The norm of all gradients over all ranks, and one factor for all of them.

    norm^p = sum over dense parameters, which all ranks share, once
           + sum over experts, once each: those of this rank's copies in the group that shares them out
           and, where stages hold different layers, the sum of that over stages

torch's own `clip_grad_norm_` knows this rank's parameters alone: ranks with different experts find different
norms, scale the dense gradients that they share differently, and their weights drift apart without a word.

Where: after `sync_gradients`, before the optimizer step. With a GradScaler, `scaler.unscale_` comes first,
and `agree_on_overflow` before it: a scaler skips the step of a rank that saw an infinity, and no other's.

Contract. All ranks get the same bits: dense norms are computed from equal gradients, those of experts are
added in the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moeclipse.comm.async_ops.lane import gather
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.guards import layers_of
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.ops.precision import WIDE


def clip_grad_norm_(
    model: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """The norm before clipping; gradients are scaled to `max_norm` where it is larger. Collective.

    `model`: the model, or parameters of it, as torch's own takes them; on all ranks alike.
    `mesh`: where stages hold different layers (pp > 1) and some have no MoE layer that knows it.
    """
    parameters = parameters_of(model)
    norm = grad_norm(model if isinstance(model, nn.Module) else parameters, norm_type, mesh)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is not finite, so they cannot be clipped; leave "
            "out error_if_nonfinite to scale them all the same"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor.to(local(parameter.grad)))
    return norm


def parameters_of(model: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(model, nn.Module):
        return list(model.parameters())
    return [model] if isinstance(model, torch.Tensor) else list(model)


@torch.no_grad()
def grad_norm(
    model: nn.Module | Sequence[torch.Tensor], norm_type: float = 2.0, mesh: Mesh | None = None
) -> torch.Tensor:
    """Over all parameters of all ranks, each counted once; a weight that two stages share counts twice."""
    parameters = parameters_of(model)
    if isinstance(model, nn.Module):
        layers = list(moe_layers(model))
    else:
        layers = [
            (f"layer {layer.layer}", layer) for layer in layers_of(parameters) if isinstance(layer, MoE)
        ]
    experts = {id(parameter) for _, layer in layers for parameter in layer.experts.parameters()}
    counted = {id(parameter) for parameter in parameters}
    dense = [p.grad for p in parameters if p.grad is not None and id(p) not in experts]
    parts = [_norm(grad, norm_type) for grad in dense]
    for name, layer in layers:
        mine = _expert_norm(layer, norm_type, counted)
        mesh = layer.mesh
        label = f"norms of expert gradients, {name}"
        everyone = gather(mesh.a2a, mesh.experts, mine, label).get().flatten()
        parts += list(everyone)
    norm = torch.zeros(()) if mesh is None else torch.zeros((), device=mesh.device)
    if parts:
        norm = _join(torch.stack([part.to(parts[0]) for part in parts]), norm_type)
    if mesh is None or mesh.pp == 1:
        return norm
    stages = gather(mesh.a2a, mesh.line, norm.double()[None], "norms of the gradients of stages").get()
    return _join(stages.flatten(), norm_type).to(norm.dtype)


@torch.no_grad()
def agree_on_overflow(model: nn.Module) -> None:
    """Let all ranks see an infinity that one of them has: before `GradScaler.unscale_`. Collective."""
    layers = list(moe_layers(model))
    if not layers:
        return
    mesh = layers[0][1].mesh
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    bad = torch.stack([~torch.isfinite(grad.sum()) for grad in grads]).any() if grads else torch.tensor(False)
    flags = gather(
        mesh.a2a, mesh.world, bad.to(mesh.device, torch.int64)[None], "overflow of gradients"
    ).get()
    infinity = torch.where(flags.any(), math.inf, 0.0)
    for grad in grads[:1]:
        grad.view(-1)[:1] += infinity.to(grad)


def local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norm(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(grad, norm_type, dtype=WIDE[grad.dtype])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _join(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(norms, norm_type)


def _expert_norm(layer: MoE, norm_type: float, counted: set[int]) -> torch.Tensor:
    """Of the experts whose primary is here, [1]: replicas have the same gradients, and count once."""
    placement, me = layer.dispatcher.placement, layer.dispatcher.group.index
    norms = []
    for parameter in layer.experts.parameters():
        grad = parameter.grad
        if grad is None or id(parameter) not in counted:
            continue
        if layer.dispatcher.table is not None:
            first = [
                slot for slot, e in enumerate(placement.slots[me]) if e >= 0 and placement.primary[e] == me
            ]
            grad = grad[first]
        if grad.numel():
            norms.append(_norm(grad, norm_type))
    if not norms:
        return layer.gate.bias_E.new_zeros(1)
    return _join(torch.stack(norms), norm_type)[None].to(layer.gate.bias_E.dtype)
