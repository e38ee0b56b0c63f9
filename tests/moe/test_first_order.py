"""Second derivatives of a node that has none are refused, whatever came in; first ones are untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apart import apart
from moeclipse.moe.first_order import first_order


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor]:
        (x,) = ctx.saved_tensors
        assert not torch.is_grad_enabled()
        return (2 * x * grad,)


@apart
def test_a_plain_sum_is_refused_too() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (once,) = torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)
    assert once.tolist() == [4.0, 6.0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


@apart
def test_without_create_graph_there_is_nothing_to_refuse() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    (once,) = torch.autograd.grad(Square.apply(x).sum(), x)
    assert not once.requires_grad
