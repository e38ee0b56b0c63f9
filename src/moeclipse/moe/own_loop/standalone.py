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

from moeclipse.comm.async_ops.exchange import total
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.exchange.replicas import sum_over_replicas
from moeclipse.moe.experts.module_experts import ModuleExperts
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.guards import averaged_text, gradients_of, is_finished
from moeclipse.moe.private_torch import ignore_in_ddp, ignored_by_ddp

COUNTERS = ("load_E", "seen_3")


HELD = "moeclipse_layer"
"""Where a module of somebody else's, the experts of a layer, holds the layer that exchanges its rows."""


def hold_layer(experts: nn.Module, layer: MoE) -> None:
    """Beside its submodules: the layer's parameters are those of `experts`."""
    experts.__dict__[HELD] = layer


def held_layer(experts: nn.Module) -> MoE | None:
    layer: MoE | None = experts.__dict__.get(HELD)
    return layer


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """All of them by name; one that a module called `experts` holds has the name of what that is part of."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            yield name, module
        elif (layer := held_layer(module)) is not None:
            yield name.rpartition(".")[0], layer


def _expert_keys(name: str, layer: MoE) -> set[str]:
    prefix = f"{name}." if name else ""
    return {f"{prefix}experts.{key}" for key, _ in layer.experts.named_parameters()}


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Parameters that differ from rank to rank because each rank holds other experts."""
    return {key for name, layer in moe_layers(model) for key in _expert_keys(name, layer)}


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The same, as `fully_shard(ignored_params=...)` wants them."""
    return {parameter for _, layer in moe_layers(model) for parameter in layer.experts.parameters()}


def counter_names(model: nn.Module) -> set[str]:
    """Buffers that count what this rank has seen: another rank's would make the sums wrong."""
    found = set()
    for name, layer in moe_layers(model):
        prefix = f"{name}." if name else ""
        counters = {key for key, _ in layer.named_buffers() if key.rpartition(".")[2] in COUNTERS}
        found |= {prefix + key for key in counters}
    return found


def exclude_experts(model: nn.Module) -> nn.Module:
    """Tell DDP to leave expert parameters and counters alone; call it on the module that DDP will wrap."""
    ignore_in_ddp(model, ignored_by_ddp(model) | expert_parameter_names(model) | counter_names(model))
    return model


def attach(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Give all MoE layers of an unpickled model their ranks; collective. Returns the model."""
    for _, layer in moe_layers(model):
        layer.attach(mesh)
    return model


def aux_loss(model: nn.Module) -> torch.Tensor:
    """Sum of all layers' losses in the last forward, to be added to a loss that is averaged over ranks.

    A layer that was called several times since its losses were asked for, or went through backward, counts as
    often.
    """
    layers = [layer for _, layer in moe_layers(model)]
    losses = [layer.unread.read(layer.last.aux_loss) for layer in layers if layer.last is not None]
    if not layers or len(losses) < len(layers):
        raise ConfigError("aux_loss(model) needs a model with MoE layers that has run forward")
    return layers[0].mesh.num_ranks * torch.stack(losses).sum()


def sync_gradients(model: nn.Module) -> None:
    """Finish the gradients of expert parameters, and move balancing biases; once before each step.

    Called again, it leaves finished gradients as they are. Parameters that are frozen, or that have no
    gradient on any rank, stay without.
    """
    refuse_averaged_experts(model)
    for name, layer in moe_layers(model):
        mesh, dispatcher = layer.mesh, layer.dispatcher
        for key, parameter in _with_gradients(name, layer):
            label = f"sum of expert gradients, {name}.{key}"
            assert parameter.grad is not None
            summed = total(mesh.grads, mesh.replicas, parameter.grad, label).get().view_as(parameter)
            if dispatcher.table is not None:
                summed = sum_over_replicas(summed, dispatcher.placement, dispatcher.group, mesh.a2a, label)
            parameter.grad = summed / mesh.num_ranks
            if mesh.num_ranks > 1:
                gradients_of(layer).of(parameter).finish()
        if layer.gate.adapts:
            mine = torch.cat([layer.load_E, layer.gate.take_seen()])
            load = total(mesh.grads, mesh.world, mine, f"sum of expert loads, {name}").get()
            layer.gate.rebalance(load[:-3], load[-3:])
        layer.load_E.zero_()


def _with_gradients(name: str, layer: MoE) -> list[tuple[str, nn.Parameter]]:
    """Those that have a raw gradient on some rank that shares them; where it is missing here, it is zero."""
    mesh = layer.mesh
    wanted = [(key, p) for key, p in layer.experts.named_parameters() if p.requires_grad]
    if not wanted:
        return []
    of = None if mesh.num_ranks == 1 else gradients_of(layer)
    if of is not None:
        of.look()
    nothing = torch.zeros((), dtype=torch.bool, device=mesh.device)
    mixed = [None if of is None else of.of(p).mixed for _, p in wanted]
    flags = [[p.grad is not None and not is_finished(p.grad), is_finished(p.grad)] for _, p in wanted]
    has_P3 = torch.cat(
        [
            torch.tensor(flags, dtype=torch.int64, device=mesh.device),
            torch.stack([nothing if m is None else m.to(mesh.device) for m in mixed]).long()[:, None],
        ],
        dim=1,
    )
    # Modules of one's own are other parameters on other ranks; built-in ones are the same everywhere.
    group = mesh.replicas if isinstance(layer.experts, ModuleExperts) else mesh.stage
    label = f"who has expert gradients, {name}"
    somewhere = total(mesh.grads, group, has_P3, label).get().view(-1, 3).tolist()
    found = [pair for pair, (raw, *_) in zip(wanted, somewhere, strict=True) if raw]
    if any(raw and (finished or more) for raw, finished, more in somewhere):
        raise ConfigError(
            f"sync_gradients has finished gradients of {name or 'the layer'}.experts to which backward has "
            "added since; call it once before each optimizer step, and zero_grad between steps"
        )
    for _, parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return found


def refuse_averaged_experts(model: nn.Module) -> None:
    """DDP that was not told about experts has averaged those of different numbers."""
    if not isinstance(model, DistributedDataParallel):
        return
    group = model.process_group
    if group is None or group.size() == 1:
        return
    ignored = set(model.parameters_to_ignore)
    for name, layer in moe_layers(model.module):
        managed = _expert_keys(name, layer) - ignored
        if managed and layer.mesh.num_ranks > 1:
            raise ConfigError(averaged_text(min(managed)))
