"""MoE layers in somebody else's training loop.

    model = DDP(exclude_experts(model))
    (task_loss(model(x)) + aux_loss(model)).backward()
    sync_gradients(model)
    optimizer.step()

DDP averages dense gradients over all ranks. An expert has already summed over the ranks that share it, so
`sync_gradients` sums over the ranks that hold copies or replicas of it and divides by the number of ranks:
then all parameters have the gradient of the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moeclipse.comm.flight.exchange import total
from moeclipse.core.errors import ConfigError
from moeclipse.moe.layer import MoE
from moeclipse.moe.private_torch import ignore_in_ddp, ignored_by_ddp
from moeclipse.moe.replicas import sum_over_replicas


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            yield name, module


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Parameters that differ from rank to rank because each rank holds other experts."""
    prefix = [(f"{name}." if name else "", layer) for name, layer in moe_layers(model)]
    return {f"{name}experts.{key}" for name, layer in prefix for key, _ in layer.experts.named_parameters()}


def exclude_experts(model: nn.Module) -> nn.Module:
    """Tell DDP to leave expert parameters alone; call it on the module that DDP will wrap."""
    ignore_in_ddp(model, ignored_by_ddp(model) | expert_parameter_names(model))
    return model


def aux_loss(model: nn.Module) -> torch.Tensor:
    """Sum of all layers' losses in the last forward, to be added to a loss that is averaged over ranks."""
    reports = [layer.last for _, layer in moe_layers(model)]
    if not reports or any(report is None for report in reports):
        raise ConfigError("aux_loss(model) needs a model with MoE layers that has run forward")
    ranks = next(moe_layers(model))[1].mesh.num_ranks
    return ranks * torch.stack([report.aux_loss for report in reports if report is not None]).sum()


def sync_gradients(model: nn.Module) -> None:
    """Finish the gradients of expert parameters, and move balancing biases; once before each step."""
    if isinstance(model, DistributedDataParallel):
        managed = expert_parameter_names(model.module) - set(model.parameters_to_ignore)
        if managed and model.process_group.size() > 1:
            raise ConfigError(
                f"DDP averages expert parameters of different experts ({sorted(managed)[0]}, ...); "
                "wrap the model with DDP(moeclipse.exclude_experts(model))"
            )
    for name, layer in moe_layers(model):
        mesh = layer.mesh
        for key, parameter in layer.experts.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            label = f"sum of expert gradients, {name}.{key}"
            summed = total(mesh.grads, mesh.replicas, parameter.grad, label).get().view_as(parameter)
            if layer.dispatcher.table is not None:
                dispatcher = layer.dispatcher
                summed = sum_over_replicas(summed, dispatcher.placement, dispatcher.group, mesh.a2a, label)
            parameter.grad = summed / mesh.num_ranks
        if layer.gate.adapts:
            mine = torch.cat([layer.load_E, layer.gate.take_seen()])
            load = total(mesh.grads, mesh.world, mine, f"sum of expert loads, {name}").get()
            layer.gate.rebalance(load[:-3], load[-3:])
        layer.load_E.zero_()
