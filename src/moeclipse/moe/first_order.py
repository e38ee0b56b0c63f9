"""Nodes of autograd whose gradients cannot be differentiated again, and say so.

torch's `once_differentiable` looks at the gradients that come in. A gradient that depends on the node's
inputs as well, but came from a plain sum, would pass for a constant: the second derivative would lack a part,
without a word. Here everything that leaves such a backward raises when somebody differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Backward = Callable[..., tuple[Any, ...]]


def first_order(backward: Backward) -> Backward:
    """Decorates the backward of a `torch.autograd.Function`."""
    once = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        found = once(ctx, *grads)
        if not torch.is_grad_enabled():
            return tuple(found)
        anchor = torch.zeros((), requires_grad=True)
        return tuple(_NotAgain.apply(anchor, g) if isinstance(g, torch.Tensor) else g for g in found)

    return checked


class _NotAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        raise RuntimeError(
            "a Mixture-of-Experts layer was differentiated twice, but its backward is once_differentiable: "
            "rows cannot travel back a second time; leave the layer out of what create_graph=True is for"
        )
