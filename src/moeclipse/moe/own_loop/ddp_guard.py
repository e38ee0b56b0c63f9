"""Wrappers that would take a layer's experts for copies of one another, found out at the first call.

DDP averages every parameter over ranks that it was not told to ignore; `fully_shard`, and FSDP before it, cut
every parameter over ranks that they were not told to ignore. All are right for weights that ranks share. But
ranks of a layer with a mesh hold different experts: averaged or cut they are a mixture of them, and nothing
would say so.
"""

from __future__ import annotations

from torch import nn

from moeclipse.core.errors import ConfigError
from moeclipse.moe.private_torch import active_ddp, in_flat_parameter, sharded_modules, transforming


def averaged_text(name: str) -> str:
    return (
        f"DDP averages expert parameters of different experts ({name}, ...); wrap the model with "
        "moeclipse.parallelize(model, mesh, dense='ddp'), or with DDP(moeclipse.exclude_experts(model))"
    )


def unattached_text(num_ranks: int) -> str:
    return (
        "this MoE layer was unpickled and knows no ranks; call moeclipse.attach(model, mesh) on each "
        f"of the {num_ranks} ranks that share its experts"
    )


def wrong_width_text(shape: tuple[int, ...], d_model: int) -> str:
    return f"the layer got tokens of shape {list(shape)}, but its d_model is {d_model}"


def refuse_transforms() -> None:
    """Transforms run forward on tensors that are no numbers, and backward to be differentiated again."""
    if transforming():
        raise RuntimeError(
            "torch.func (grad, vjp, jvp, jacrev, hessian, vmap) cannot see through a Mixture-of-Experts "
            "layer, whose rows travel; take first derivatives with torch.autograd.grad (and "
            "torch.func.functional_call), and none of second order"
        )


def wrapping(experts: nn.Module) -> tuple[int, int]:
    """What changes with a wrapper: DDP's is known in forward, and `fully_shard` replaces parameters."""
    return id(active_ddp()), id(next(experts.parameters(), None))


def refuse_wrong_wrap(experts: nn.Module) -> None:
    """Of a layer whose ranks hold different experts; inside its forward."""
    mine = {id(parameter) for parameter in experts.parameters()}
    ddp = active_ddp()
    if ddp is not None and ddp.process_group.size() > 1:
        ignored = set(ddp.parameters_to_ignore)
        for name, parameter in ddp.module.named_parameters():
            if id(parameter) in mine and name not in ignored:
                raise ConfigError(averaged_text(name))
    if sharded_modules() & set(experts.modules()):
        raise ConfigError(
            "fully_shard cuts expert parameters of different experts over ranks; use "
            "moeclipse.parallelize(model, mesh, dense='fsdp2'), or give "
            "fully_shard(..., ignored_params=moeclipse.expert_parameters(model))"
        )
    if in_flat_parameter(experts):
        raise ConfigError(
            "FullyShardedDataParallel cuts expert parameters of different experts over ranks; use "
            "moeclipse.parallelize(model, mesh, dense='fsdp2'), or give "
            "FullyShardedDataParallel(..., ignored_states=moeclipse.expert_parameters(model))"
        )
