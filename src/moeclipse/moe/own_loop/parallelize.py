"""A model with MoE layers over many ranks, in one call: experts stay apart, all other weights are shared.

    model = parallelize(model, mesh, dense="ddp")        dense weights on every rank, their gradients averaged
    model = parallelize(model, mesh, dense="fsdp2")      dense weights cut over ranks, gathered when needed
    model = parallelize(model, mesh)                     nothing is done with dense weights

Gradients are those of the mean of the ranks' losses, dense ones after backward, experts' after
`sync_gradients`. Layers without a mesh, or with another one, are attached to this one.

Hazards. FSDP2's own average divides twice on one rank and rounds in half precision; here sums travel and are
divided once. Counters of the gates are this rank's own: DDP, which broadcasts buffers, must not see them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.own_loop.standalone import exclude_experts, expert_parameters, moe_layers

DENSE = ("ddp", "fsdp2", None)


def parallelize(
    model: nn.Module, mesh: Mesh, *, dense: Literal["ddp", "fsdp2"] | None = None, **options: Any
) -> nn.Module:
    """The model, wrapped. `options` go to DDP or to `fully_shard`. Collective over all ranks of the mesh."""
    if dense not in DENSE:
        raise ConfigError(f"dense ({dense!r}) must be 'ddp', 'fsdp2' or None")
    if mesh.pp > 1 and dense is not None:
        raise ConfigError(
            f"dense = {dense!r} needs a mesh with pp = 1, not {mesh.pp}: stages hold other layers"
        )
    for name, layer in moe_layers(model):
        if layer.mesh is not mesh and layer.mesh.num_ranks > 1:
            raise ConfigError(
                f"layer {name} has another mesh; give all layers the mesh that parallelize gets"
            )
        if layer.mesh is not mesh and mesh.experts.size > 1:
            raise ConfigError(
                f"layer {name} was made without a mesh and holds all experts; make it with "
                "MoE(..., mesh=mesh)"
            )
        if layer.mesh is not mesh:
            layer.attach(mesh)
    if mesh.num_ranks == 1 or dense is None:
        return model
    if dense == "ddp":
        return DistributedDataParallel(exclude_experts(model), **options)
    return _sharded(model, mesh, options)


def _sharded(model: nn.Module, mesh: Mesh, options: dict[str, object]) -> nn.Module:
    """Block by block, where the model has lists of blocks; what is left over belongs to the whole."""
    over = DeviceMesh(mesh.device.type, list(range(dist.get_world_size())))
    given: dict[str, Any] = {"mesh": over, "ignored_params": expert_parameters(model), **options}
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    inside = {each for _, layer in moe_layers(model) for each in layer.modules()}
    for block in (*(block for block in blocks if block not in inside), model):
        sharded: FSDPModule = fully_shard(block, **given)
        sharded.set_gradient_divide_factor(float(mesh.num_ranks))
        sharded.set_force_sum_reduction_for_comms(True)
    return model
