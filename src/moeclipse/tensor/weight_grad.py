"""The one place that knows how a weight gradient reaches its accumulator.

A trainer gives each parameter a `main_grad` (fp32, or the parameter's dtype where that is wider) that
lives in a flat buffer and sums over microbatches. A parameter without one, in a user's own loop, gets
its gradient in `.grad` as always. Whoever computes a weight gradient by hand asks `accumulator` where to
add it and what to tell autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients sum in fp32, or in fp64 for fp64 models."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attach(parameter: torch.nn.Parameter, main_grad: torch.Tensor, ready: Callable[[], None]) -> None:
    """From now on gradients of `parameter` add into `main_grad`; `ready` is called after each backward.

    The hook runs once in each backward, after all uses of the parameter, also when whoever used it has
    added into main_grad by hand and gave autograd nothing.
    """
    parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def take(p: torch.Tensor) -> None:
        if p.grad is not None:
            main_grad.add_(p.grad)
            p.grad = None
        ready()

    parameter.register_post_accumulate_grad_hook(take)


def accumulator(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(where to add a gradient computed by hand, what to hand to autograd afterwards).

    With a main_grad autograd gets nothing; without one it gets a fresh gradient, zeros to begin with, so
    that a weight that was not used has a zero gradient and not None.
    """
    main_grad: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        return main_grad, None
    grad = torch.zeros_like(parameter)
    return grad, grad
