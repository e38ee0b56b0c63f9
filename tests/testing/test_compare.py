"""How far results are apart, as our promise is worded."""

from __future__ import annotations

import pytest
import torch

from moeclipse.testing.compare import difference


def test_difference_is_relative_to_the_largest_reference() -> None:
    assert difference(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 10.0])) == pytest.approx(0.1)
    assert difference(torch.zeros(3), torch.zeros(3)) == 0.0
    assert difference(torch.ones(1), torch.zeros(1)) == float("inf")
    assert difference(torch.tensor([float("nan")]), torch.ones(1)) != 0.0


def test_gradients_and_low_precision_are_compared_in_float64() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    assert difference(value, torch.tensor([1.0, 2.0]).bfloat16()) == 0.0
    assert 0 < difference(torch.tensor([1 + 1e-15], dtype=torch.float64), torch.ones(1)) < 1e-14


def test_shapes_must_agree_also_where_there_is_nothing() -> None:
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    with pytest.raises(AssertionError, match=r"shapes differ: \(2,\), \(1, 2\)"):
        difference(torch.zeros(2), torch.zeros(1, 2))


def test_plain_numbers_are_compared_in_float64() -> None:
    assert 0 < difference([1 + 1e-12], [1.0]) < 1e-11, "float32 would see no difference"
    assert difference([2.0, 1.0], torch.tensor([2.0, 1.0])) == 0.0


def test_zeros_are_no_result() -> None:
    assert difference(torch.zeros(3), torch.tensor([1.0, 2.0, 4.0])) == 1.0
