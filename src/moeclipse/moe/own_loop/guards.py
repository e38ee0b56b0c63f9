"""What wrappers, optimizers and norms of others would do to experts that differ from rank to rank.

DDP averages every parameter over ranks that it was not told to ignore; `fully_shard`, and FSDP before it, cut
every parameter over ranks that they were not told to ignore. All are right for weights that ranks share. But
ranks of a layer with a mesh hold different experts: averaged or cut they are a mixture of them, and nothing
would say so. That is found out at the first call, and whenever the wrapping changes.

A gradient is raw, what backward left in `.grad`: this rank's sum for its experts. Or it is finished, what
`sync_gradients` made of it: the tensor carries a mark, which lives as long as it does.

A step with raw gradients, a second division by the number of ranks and a norm of one rank's experts all train
another model without a word. So each parameter of experts that differ from rank to rank has two hooks: they
know when backward adds to a gradient, and whether that was finished before. Who forgot `sync_gradients`
hears of it at the optimizer's step, or, where no optimizer of torch steps, at the next forward: weights have
changed since the gradient began. Where that is gone by then, nobody knows whether it was used: a warning.
(Nor does it tell when it went: who puts weights back after a trial and then throws it away is right.)

Contract. Accumulation over any number of forwards, gradients that are thrown away, `zero_grad` of either kind
and `torch.autograd.grad` are as they were. Nothing here waits for the device or for another rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.core.shown import warn
from moeclipse.moe.private_torch import (
    VERSION_OF,
    active_ddp,
    guard_clipping,
    in_flat_parameter,
    sharded_modules,
    transforming,
)

MARK = "moeclipse_finished"
LAYER = "moeclipse_layer"
"""Where a parameter of experts that ranks share out has its `LayerOf`."""


def is_finished(grad: torch.Tensor | None) -> bool:
    return grad is not None and MARK in vars(grad)


class Grad:
    """Of one parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = ref(parameter)
        self.begun: int | None = None
        """The version of the weights when backward began a raw gradient; None: there is none."""
        self.mixed: torch.Tensor | None = None
        """Whether backward added to a finished gradient that was not zero."""
        self._left: torch.Tensor | None = None
        parameter.register_hook(self._before)
        parameter.register_post_accumulate_grad_hook(self._after)

    @property
    def parameter(self) -> nn.Parameter | None:
        return self._parameter()

    def _before(self, _: torch.Tensor) -> None:
        grad = None if self.parameter is None else self.parameter.grad
        self._left = grad.detach().any() if grad is not None and is_finished(grad) else None

    def _after(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and is_finished(parameter.grad):
            delattr(parameter.grad, MARK)
            self.mixed = self._left
        if self.begun is None:
            self.begun = VERSION_OF(parameter)

    def finish(self) -> None:
        self.begun = self.mixed = None
        if self.parameter is not None and self.parameter.grad is not None:
            setattr(self.parameter.grad, MARK, True)

    def stepped_raw(self, loaded: bool) -> bool:
        """Whether weights changed under a raw gradient; one that was thrown away is forgotten."""
        parameter = self.parameter
        if parameter is None or self.begun is None:
            return False
        changed = VERSION_OF(parameter) != self.begun and not loaded
        if loaded or parameter.grad is None:
            self.begun = self.mixed = None
        return changed


class Guarded(Protocol):
    """What a `MoE` is here."""

    mesh: Mesh
    layer: int

    @property
    def experts(self) -> nn.Module: ...


class Gradients:
    """Of the experts of one layer."""

    def __init__(self, layer: Guarded) -> None:
        mesh, experts = layer.mesh, layer.experts
        self.where, self.shared_out = f"layer {layer.layer}", mesh.experts.size > 1
        self._experts, self._loads, self._layer = ref(experts), loads_of(experts), LayerOf(layer)
        self._of: dict[int, Grad] = {}
        mesh.once("gradients of experts", begin_watch).add(self)
        self.look()

    def look(self) -> None:
        """Watch what became trainable, or took another's place, since the last look."""
        experts = self._experts()
        for parameter in () if experts is None else experts.parameters():
            known = self._of.get(id(parameter))
            owned = parameter.requires_grad and parameter.is_leaf  # not what functional_call was given
            if owned and (known is None or known.parameter is not parameter):
                self._of[id(parameter)] = Grad(parameter)
                setattr(parameter, LAYER, self._layer)

    def __iter__(self) -> Iterator[Grad]:
        return (grad for grad in self._of.values() if grad.parameter is not None)

    def of(self, parameter: nn.Parameter) -> Grad:
        return self._of[id(parameter)]

    def before_forward(self) -> None:
        """In training: weights that changed under raw gradients were changed by them."""
        self.look()
        experts = self._experts()
        loads = 0 if experts is None else loads_of(experts)
        loaded, self._loads = loads != self._loads, loads
        stepped = [grad for grad in self if grad.stepped_raw(loaded)]
        if any(grad.begun is not None for grad in stepped):
            raise ConfigError(forgotten_text(self.where, "weights were changed"))
        if stepped:  # the gradients are gone: used by somebody's own step, or thrown away
            warn(forgotten_text(self.where, "weights were changed after a backward"))


def gradients_of(layer: Guarded) -> Gradients:
    """Of a `MoE` with a mesh of several ranks; it holds them."""
    found: Gradients | None = vars(layer).get("gradients")
    if found is None:
        found = layer.__dict__["gradients"] = Gradients(layer)
    return found


class LayerOf:
    """A layer that outlives its parameters or not; what is copied or pickled knows none."""

    def __init__(self, layer: Guarded | None = None) -> None:
        self._layer = None if layer is None else ref(layer)

    def __call__(self) -> Guarded | None:
        return None if self._layer is None else self._layer()

    def __reduce__(self) -> tuple[type[LayerOf], tuple[()]]:
        return LayerOf, ()


def name_layer(layer: Guarded) -> None:
    """Let its experts' parameters know it, where ranks hold different experts."""
    if layer.mesh.num_ranks > 1:
        try:
            parameters = list(layer.experts.parameters())
        except AttributeError:  # of another library's module, which is just being copied around the layer
            return
        for parameter in parameters:
            setattr(parameter, LAYER, LayerOf(layer))


def layers_of(parameters: Iterable[torch.Tensor]) -> list[Guarded]:
    """Layers whose experts are among these, in their order, where ranks hold different experts."""
    found = (getattr(parameter, LAYER, LayerOf())() for parameter in parameters)
    return list(dict.fromkeys(layer for layer in found if layer is not None))


def loads_of(experts: nn.Module) -> int:
    """How often a state was loaded into them."""
    return int(getattr(experts, "loads", 0))


def forgotten_text(where: str, what: str) -> str:
    return (
        f"{what} with gradients of experts that sync_gradients has not finished ({where}); call "
        "moeclipse.sync_gradients(model) after backward, before each optimizer step"
    )


def begin_watch() -> WeakSet[Gradients]:
    known = WeakSet[Gradients]()
    register_optimizer_step_pre_hook(partial(before_step, known))
    guard_clipping(partial(before_clipping, known))
    return known


def before_step(
    known: Iterable[Gradients], optimizer: Optimizer, args: tuple[object, ...], options: dict[str, object]
) -> None:
    """A closure runs backward inside of the step, so there the next forward has to look."""
    by_id = {id(grad.parameter): (grad, layer) for layer in known for grad in layer}
    given = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    mine = [by_id[number] for number in given if number in by_id]
    if mine and any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise ConfigError(
            f"ZeroRedundancyOptimizer would give all ranks the experts of one ({mine[0][1].where}); give it "
            "the dense parameters alone, and those of moeclipse.expert_parameters(model) to an optimizer "
            "of their own: their state is shared out already"
        )
    if any(callable(closure) for closure in (*args[1:], options.get("closure"))):
        return
    for grad, layer in mine:
        parameter = grad.parameter
        if grad.begun is not None and parameter is not None and parameter.grad is not None:
            raise ConfigError(forgotten_text(layer.where, "optimizer.step() was called"))


def before_clipping(known: Iterable[Gradients], grads: Iterable[torch.Tensor]) -> None:
    """torch's own norm is right where all ranks have all experts, and their gradients are finished."""
    given = set(map(id, grads))
    for layer in known:
        for grad in layer:
            found = None if grad.parameter is None else grad.parameter.grad
            if found is not None and id(found) in given and (layer.shared_out or grad.begun is not None):
                raise ConfigError(
                    f"torch's clip_grad_norm_ sees this rank's experts alone ({layer.where}), so each rank "
                    "would scale the dense gradients that all share by another factor; use "
                    "moeclipse.clip_grad_norm_(model, max_norm) after moeclipse.sync_gradients(model)"
                )


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
    group = None if ddp is None else ddp.process_group
    if ddp is not None and group is not None and group.size() > 1:
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
