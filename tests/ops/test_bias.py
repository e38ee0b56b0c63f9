"""Biases of experts: added to their rows, summed in their gradients."""

from __future__ import annotations

import pytest
import torch
from interpreted import assert_equal_references

from moeclipse.ops.bias import add_bias, bias_dots, expert_of_rows, group_sum
from moeclipse.ops.grouping import Grouping, group_counts

COUNTS = [2, 0, 3]
OWNERS = [0, 0, 2, 2, 2]


def grouping(room: int = 5) -> Grouping:
    return group_counts(torch.tensor(COUNTS), room)


def test_rows_know_their_expert() -> None:
    assert expert_of_rows(grouping()).tolist() == OWNERS
    assert expert_of_rows(grouping(room=7)).tolist() == [*OWNERS, 2, 2], "unused ones count as the last's"


def test_a_bias_is_added_to_its_experts_rows() -> None:
    rows, bias = torch.randn(5, 4), torch.randn(3, 4)
    assert add_bias(rows, None, grouping()) is rows
    assert torch.equal(add_bias(rows, bias, grouping()), rows + bias[OWNERS])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dots_with_the_bias_of_each_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dy, bias = torch.randn(4, 6).to(dtype), torch.randn(3, 6).to(dtype)
    index = torch.tensor([3, 1, 0, 2, 2])
    dots = bias_dots(dy, bias, grouping(), index)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (dy[index].to(wide) * bias[OWNERS].to(wide)).sum(1)
    torch.testing.assert_close(dots, expected)
    rows = torch.randn(5, 6).to(dtype)
    torch.testing.assert_close(
        bias_dots(rows, bias, grouping()), (rows.to(wide) * bias[OWNERS].to(wide)).sum(1)
    )


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_groups_by_hand(accumulate: bool) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(4, 2, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    index = torch.tensor([3, 1, 0, 2, 2, 0, 0])
    into = torch.full((3, 2), 5.0, dtype=torch.float64)
    group_sum(rows, grouping(room=7), into, index_M=index, weight_M=weight, accumulate=accumulate)
    before = 5.0 if accumulate else 0.0
    picked = rows[index] * weight[:, None]
    expected = torch.stack(
        [before + picked[:2].sum(0), torch.full((2,), before), before + picked[2:5].sum(0)]
    )
    torch.testing.assert_close(into, expected.double())


def test_sums_are_rounded_once() -> None:
    rows = torch.tensor([[1.0], [2**-8], [2**-8]]).bfloat16()
    into = torch.zeros(1, 1).bfloat16()
    group_sum(rows, group_counts(torch.tensor([3]), 3), into)
    assert into.equal(torch.tensor([[1 + 2**-7]]).bfloat16())


def test_the_kernel_equals_the_reference() -> None:
    assert_equal_references("bias", "group sum")
