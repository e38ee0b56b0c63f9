"""State of any torch optimizer that steps for experts: saved and loaded by expert, as their weights are.

An optimizer makes its state like the parameters that it was given, and those are this rank's experts: equal
names on other ranks mean other experts, and `torch.distributed.checkpoint` would keep one rank's for all. So
`optimizer.state_dict()` says of such tensors which experts they are (`moe/own_loop/shards`), and
`load_state_dict` takes them back. Nobody has to ask for this: before its first step every optimizer of the
process is looked at for parameters of experts, and `get_optimizer_state_dict` makes a step where there has
been none.

Contract. A state tensor of the parameter's shape, or with a row for each of its slots, belongs to experts;
all others (the number of steps) are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.own_loop.shards import ExpertPlace, ExpertShards

Known = WeakSet[Experts]


def watch_optimizers(mesh: Mesh, experts: Experts) -> None:
    """From now on, what steps for these experts saves and loads its state by expert."""

    def begin() -> Known:
        known, adopted = Known(), WeakSet[Optimizer]()
        register_optimizer_step_pre_hook(partial(adopt, known, adopted))
        return known

    mesh.once("experts with optimizers", begin).add(experts)


T = TypeVar("T")


def adopt(known: Known, adopted: WeakSet[Optimizer], optimizer: Optimizer, *_: object) -> None:
    """Before a step: let this optimizer speak of experts, if it steps for any."""
    if optimizer in adopted or not places_of(known, parameters_of(optimizer.param_groups)):
        return
    adopted.add(optimizer)
    optimizer.register_state_dict_post_hook(partial(say, known))
    optimizer.register_load_state_dict_pre_hook(partial(take, known))
    for parameter, place in places_of(known, optimizer.state).items():  # loaded before anybody looked
        state = optimizer.state[parameter]
        state.update({key: taken(value, place, key) for key, value in state.items()})


def places_of(
    known: Iterable[Experts], parameters: Iterable[torch.Tensor]
) -> dict[torch.Tensor, ExpertPlace]:
    """Of those parameters that belong to experts of which some are elsewhere."""
    wanted = {id(parameter): parameter for parameter in parameters}
    return {
        wanted[id(parameter)]: experts.places[name]
        for experts in known
        for name, parameter in experts.named_parameters()
        if id(parameter) in wanted and not experts.places[name].whole
    }


def parameters_of(groups: Iterable[Mapping[str, Iterable[T]]]) -> list[T]:
    """Tensors, or in a saved state their numbers."""
    return list(chain.from_iterable(group["params"] for group in groups))


def changed(
    known: Known,
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    change: Callable[[str, object, ExpertPlace, torch.Tensor], object],
    *,
    strict: bool,
) -> dict[str, Any]:
    """The state with `change(key, value, place, parameter)` of all that is kept for experts.

    `strict`: it is this optimizer's own, and has as many parameters; another's is refused by torch.
    """
    numbers = parameters_of(state_dict["param_groups"])
    parameters = parameters_of(optimizer.param_groups)
    places = places_of(known, parameters)
    state = dict(state_dict["state"])
    for number, parameter in zip(numbers, parameters, strict=strict):
        if parameter in places and number in state:
            place, kept = places[parameter], state[number]
            state[number] = {key: change(key, value, place, parameter) for key, value in kept.items()}
    return {**state_dict, "state": state}


def say(known: Known, optimizer: Optimizer, state_dict: dict[str, object]) -> dict[str, object]:
    return changed(known, optimizer, state_dict, lambda _, value, *of: said(value, *of), strict=True)


def said(value: object, place: ExpertPlace, parameter: torch.Tensor) -> object:
    if not isinstance(value, torch.Tensor) or isinstance(value, ExpertShards) or value.dim() == 0:
        return value
    if value.shape == parameter.shape:
        return ExpertShards(value, place)
    if value.dim() == 1 or len(value) != len(place.experts):
        return value
    if place.cut is not None:
        raise ConfigError(
            f"an optimizer keeps {tuple(value.shape)} for experts of shape {tuple(parameter.shape)} whose "
            "width is shared out over tp, and nothing says which part of it that is; use expert_tp='folded'"
        )
    return ExpertShards(value, place)


def take(known: Known, optimizer: Optimizer, state_dict: dict[str, object]) -> dict[str, object]:
    return changed(
        known, optimizer, state_dict, lambda key, value, place, _: taken(value, place, key), strict=False
    )


def taken(value: object, place: ExpertPlace, name: str) -> object:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return place.take(value, f"the optimizer's {name}")
