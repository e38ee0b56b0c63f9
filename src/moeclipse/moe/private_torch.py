"""Every private name of torch that this room uses. All are there in torch 2.11 to 2.13.

DistributedDataParallel._set_params_and_buffers_to_ignore_for_model, _ddp_params_and_buffers_to_ignore
                    DDP takes every parameter that wants a gradient, and has no argument to leave out
                    those of experts
torch._C._current_graph_task_id
                    which backward runs, -1 for none: a forward inside one is a forward that runs again
torch._C._autograd._get_current_graph_task_keep_graph
                    whether the backward that runs was asked to keep its graph (`retain_graph`)
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

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.nn.parallel import DistributedDataParallel

TO_COPY = torch.ops.aten._to_copy.default


def wrapper(cls: type, shape: Sequence[int], like: torch.Tensor) -> Any:
    """An instance of `cls` that looks like a tensor of this shape and has no memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=like.dtype, device=like.device, requires_grad=False
    )


def ignored_by_ddp(model: nn.Module) -> set[str]:
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Before DDP wraps `model`."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))


def active_ddp() -> DistributedDataParallel | None:
    """The wrapper inside whose forward we are."""
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return active


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def keeps_graph() -> bool:
    """Whether the backward that runs may run again over the same graph; outside of any: True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def transforming() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def version(tensor: torch.Tensor) -> int:
    return int(tensor._version)


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
