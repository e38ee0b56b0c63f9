"""Tensors taken out of a tree and put back: the same tree, each tensor once, and nothing else touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moeclipse.moe.exchange.saved_tensors import Place, put_together, take_apart


@dataclass(frozen=True, kw_only=True)
class Leaf:
    x: torch.Tensor
    number: int = 3
    more: Any = None


@dataclass(frozen=True)
class Opaque:
    x: torch.Tensor


def test_a_tree_comes_back_as_it_was() -> None:
    x, y, z = torch.ones(2), torch.zeros(3), torch.arange(4)
    tree = {(0, 1): Leaf(x=x, more=[y, (z, None)]), (1, 0): Leaf(x=x), "size": x.shape, "slice": slice(1, 2)}
    skeleton, tensors = take_apart(tree)
    assert [id(tensor) for tensor in tensors] == [id(x), id(y), id(z)], "each once"
    assert skeleton[1, 0].x == Place(0)
    assert skeleton["size"] == x.shape
    back = put_together(skeleton, tensors)
    assert back[0, 1].x is back[1, 0].x is x
    assert back[0, 1].more[0] is y
    assert back[0, 1].more[1] == (z, None) or back[0, 1].more[1][0] is z
    assert back[0, 1].number == 3
    assert back["slice"] == slice(1, 2)


def test_other_tensors_may_be_put_back() -> None:
    skeleton, tensors = take_apart([Leaf(x=torch.ones(2))])
    other = torch.zeros(2)
    assert put_together(skeleton, [other])[0].x is other
    assert put_together(skeleton, tensors)[0].x is tensors[0], "a skeleton serves many times"


def test_what_is_whole_is_left_alone() -> None:
    inner = Opaque(torch.ones(2))
    skeleton, tensors = take_apart({"a": inner, "b": torch.ones(1)}, (Opaque,))
    assert skeleton["a"] is inner
    assert len(tensors) == 1
    assert put_together(skeleton, tensors, (Opaque,))["a"] is inner
