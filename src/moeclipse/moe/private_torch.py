"""Every private name of torch that this room uses. All are there in torch 2.11 to 2.13.

DistributedDataParallel._set_params_and_buffers_to_ignore_for_model, _ddp_params_and_buffers_to_ignore
                    DDP takes every parameter that wants a gradient, and has no argument to leave out
                    those of experts
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ignored_by_ddp(model: nn.Module) -> set[str]:
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Before DDP wraps `model`."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))
