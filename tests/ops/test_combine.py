"""Sums of rows that belong together, by their definition."""

from __future__ import annotations

import pytest
import torch
from interpreted import assert_equal_references

from moeclipse.ops.combine import gather_sum, sum_rows


def test_rows_that_nothing_points_at_are_zero() -> None:
    rows = torch.randn(3, 2, dtype=torch.float64)
    out = sum_rows(rows, torch.tensor([2, 0, 2]), 4, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    assert torch.allclose(out[2], 0.5 * rows[0] + 2 * rows[2])
    assert torch.count_nonzero(out[[1, 3]]) == 0
    assert sum_rows(rows.bfloat16(), torch.tensor([0, 0, 0]), 1).dtype == torch.bfloat16


@pytest.mark.parametrize("weighted", [False, True])
def test_places_that_are_unused_add_nothing(weighted: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 3, dtype=torch.float64)
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    place = torch.tensor([[4, -1, 0], [-1, -1, -1], [2, 2, 3]], dtype=torch.int32)
    scale = torch.ones(5, dtype=torch.float64) if weight is None else weight
    expected = [sum((scale[k] * rows[k] for k in row if k >= 0), torch.zeros(3)) for row in place.tolist()]
    torch.testing.assert_close(gather_sum(rows, place, weight), torch.stack(expected).double())


def test_sums_are_rounded_once() -> None:
    """1 + 2^-8 + 2^-8: each half step of bf16 alone would be lost."""
    rows = torch.tensor([[1.0], [2**-8], [2**-8]]).bfloat16()
    expected = torch.tensor([[1.0 + 2**-7]]).bfloat16()
    assert sum_rows(rows, torch.zeros(3, dtype=torch.int64), 1).equal(expected)
    assert gather_sum(rows, torch.tensor([[0, 1, 2]])).equal(expected)


def test_both_sums_agree() -> None:
    torch.manual_seed(0)
    rows, weight, index = torch.randn(6, 4), torch.rand(6), torch.tensor([2, 0, 2, 1, 0, 2])
    place = torch.tensor([[1, 4, -1], [3, -1, -1], [0, 2, 5]])
    torch.testing.assert_close(gather_sum(rows, place, weight), sum_rows(rows, index, 3, weight))


def test_the_kernel_equals_the_reference() -> None:
    assert_equal_references("combine", "combine 4", "combine 20")


def test_tokens_without_any_row_have_zeros() -> None:
    """As where all rows of a rank stay with shadows: a device would stop at an index into nothing."""
    rows, place = torch.empty(0, 4), torch.full((3, 2), -1)
    assert gather_sum(rows, place).equal(torch.zeros(3, 4))
    assert gather_sum(rows, place, torch.empty(0)).equal(torch.zeros(3, 4))
    assert sum_rows(rows, torch.empty(0, dtype=torch.int64), 3).equal(torch.zeros(3, 4))
