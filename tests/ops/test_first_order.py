"""Second derivatives of a node that has none are refused, whatever came in; first ones are untouched."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import moeclipse
from apart import apart
from moeclipse.ops.first_order import first_order

SOURCE = Path(moeclipse.__file__).parent


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
    with pytest.raises(RuntimeError, match="Square was differentiated with create_graph=True"):
        torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)


@apart
def test_without_create_graph_there_is_nothing_to_refuse() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    (once,) = torch.autograd.grad(Square.apply(x).sum(), x)
    assert once.tolist() == [4.0]
    assert not once.requires_grad


def test_every_node_of_ours_is_of_first_order() -> None:
    """But for one whose gradients are taken on the way: torch's own mark has a hole (see the module)."""
    bare = set()
    for text in map(Path.read_text, SOURCE.rglob("*.py")):
        classes = ast.walk(ast.parse(text)) if "autograd.Function)" in text else ()
        for node in classes:
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                found = next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "backward")
                if "first_order" not in map(ast.unparse, found.decorator_list):
                    bare.add(node.name)
    assert bare == {"_Begin"}
