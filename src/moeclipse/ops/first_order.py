"""Nodes of autograd whose gradients cannot be differentiated again, and say so in every form of the call.

A gradient depends on what came in and on the node's inputs. torch's `once_differentiable` looks at what came
in alone, and marks what leaves by a leaf that `grad(loss, weights)`, `backward(inputs=...)`, `hvp` and
`hessian` never visit: they would return a number that lacks a part, without a word. A backward that builds a
graph of itself (`create_graph=True`) is asked for only to be differentiated again, so it is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Backward = Callable[..., tuple[Any, ...]]


def first_order(backward: Backward) -> Backward:
    """Decorates the backward of a `torch.autograd.Function`."""
    name = backward.__qualname__.rpartition(".")[0].lstrip("_")

    @wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            refuse_second_order(name)
        return backward(ctx, *grads)

    return checked


def refuse_second_order(name: str) -> None:
    """Called inside of a backward."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} was differentiated with create_graph=True, but its backward is once_differentiable: "
            "rows cannot travel back a second time; leave Mixture-of-Experts layers out of second "
            "derivatives (gradient penalties, torch.autograd.functional.hvp, hessian, jvp)"
        )
