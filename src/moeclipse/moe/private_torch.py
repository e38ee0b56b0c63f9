"""Every private name of torch (and of accelerate) that this room uses. All are there in torch 2.11 to 2.13.

DistributedDataParallel._set_params_and_buffers_to_ignore_for_model, _ddp_params_and_buffers_to_ignore
                    DDP takes every parameter that wants a gradient, and has no argument to leave out
                    those of experts
torch._C._current_graph_task_id
                    which backward runs, -1 for none: a forward inside one is recomputed
torch._C._autograd._get_current_graph_task_keep_graph
                    whether the backward that runs was asked to keep its graph (`retain_graph`)
torch.nn.utils.clip_grad._clip_grads_with_norm_
                    what `clip_grad_norm_` calls to scale gradients, whoever imported it from where
FlatParameter._is_flat_param, Tensor._base, "_fsdp_wrapped_module"
                    whether a tensor is a part of what FSDP, version 1, made of many
sys._getframe, Accelerator._save_model_state_pre_hook
                    whether accelerate is about to let one rank write its state
torch._C._are_functorch_transforms_active
                    whether a transform of torch.func looks at what runs
Tensor._version     how often a tensor was changed in place
Tensor._make_wrapper_subclass, aten._to_copy
                    a tensor whose numbers are kept by another one, and what `to` becomes inside of it
DistributedDataParallel._get_active_ddp_module
                    the wrapper whose forward runs
_composable_state._module_state_mapping, FSDPState._fsdp_param_groups (one: _fsdp_param_group),
FSDPParam._module_info
                    whose parameters `fully_shard` has taken: inside forward they look like any others
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import attrgetter
from typing import TypeVar

import torch
from torch import nn
from torch._C import _autograd
from torch.distributed import _composable_state
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

Wrapping = TypeVar("Wrapping", bound=torch.Tensor)
TO_COPY = torch.ops.aten._to_copy.default


def wrapper(cls: type[Wrapping], shape: Sequence[int], like: torch.Tensor) -> Wrapping:
    """An instance of `cls` that looks like a tensor of this shape and has no memory."""
    made: Wrapping = torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=like.dtype, device=like.device, requires_grad=False
    )
    return made


def ignored_by_ddp(model: nn.Module) -> set[str]:
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Before DDP wraps `model`."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))


# The wrapper inside whose forward we are; whether torch.func looks at what runs.
active_ddp: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


# Which backward runs, and whether it may run again over the same graph (outside of any: True); how often a
# tensor was changed.
running_backward: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1
keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
VERSION_OF: Callable[[torch.Tensor], int] = attrgetter("_version")


def sharded_modules() -> set[nn.Module]:
    """Modules of which `fully_shard` has taken a parameter."""
    states = [reference() for reference in _composable_state._module_state_mapping.values()]
    found = set()
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one, under another name
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        found |= {each._module_info.module for group in groups if group for each in group.fsdp_params}
    return found


def accelerate_saves() -> bool:
    """Whether we are inside `save_state` or `save_model` of an `Accelerator` that has no hook to save by.

    It tells nobody that it saves, so the frames that called are looked at; without accelerate at none.
    """
    frame = sys._getframe(1) if "accelerate" in sys.modules else None
    while frame is not None:
        saves = frame.f_code.co_name in ("save_state", "save_model")
        if saves and frame.f_globals.get("__name__") == "accelerate.accelerator":
            return not frame.f_locals["self"]._save_model_state_pre_hook
        frame = frame.f_back
    return False


def in_flat_parameter(module: nn.Module) -> bool:
    """Whether FSDP, version 1, has taken parameters of it; inside forward, where they are views."""
    for each in module.modules():
        here = [*each._parameters.values(), *vars(each).values()]
        bases = [tensor._base for tensor in here if isinstance(tensor, torch.Tensor)]
        if "_fsdp_wrapped_module" in each._modules or any(hasattr(base, "_is_flat_param") for base in bases):
            return True
    return False


def guard_clipping(check: Callable[[list[torch.Tensor]], None]) -> None:
    """Let `check` see all gradients that `torch.nn.utils.clip_grad_norm_` is about to scale.

    With an infinite norm nothing is scaled: who only measures (transformers' Trainer, for its log) may.
    """
    scale: Callable[..., None] = clip_grad._clip_grads_with_norm_

    @wraps(scale)
    def checked(
        parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, *args: object, **options: object
    ) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if max_norm != math.inf:
            check([parameter.grad for parameter in given if parameter.grad is not None])
        scale(given, max_norm, *args, **options)

    clip_grad._clip_grads_with_norm_ = checked
