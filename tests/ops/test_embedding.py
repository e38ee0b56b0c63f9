"""Gradients of a lookup: sums over the tokens that read a row, by a product or one after the other."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.embedding import embedding_grad, embedding_grad_product
from moeclipse.testing.compare import difference


@pytest.mark.parametrize("add", [embedding_grad, embedding_grad_product])
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_rows_add_up(add, tokens: int) -> None:
    ids = torch.arange(tokens) * 7 % 5
    d_h = torch.randn(tokens, 3, dtype=torch.float64)
    into = torch.ones(6, 3, dtype=torch.float64)
    add(ids, d_h, into)
    expected = torch.ones(6, 3, dtype=torch.float64)
    for row, value in zip(ids.tolist(), d_h, strict=True):
        expected[row] += value
    assert difference(into, expected) < 1e-14


@pytest.mark.parametrize("add", [embedding_grad, embedding_grad_product])
def test_ids_of_other_ranks_add_nothing(add) -> None:
    into = torch.zeros(2, 3)
    add(torch.tensor([-4, 1, 2, 0]), torch.ones(4, 3), into, outside=True)
    assert into.tolist() == [[1.0] * 3] * 2


def test_sums_are_as_wide_as_their_place() -> None:
    into = torch.zeros(1, 1)
    embedding_grad_product(torch.zeros(300, dtype=torch.int64), torch.ones(300, 1).bfloat16(), into)
    assert into.item() == 300, "bf16 would have stopped at 256"
