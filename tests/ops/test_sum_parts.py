"""Parts added up: stored, added, rounded once, and where the sum goes."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.sum_parts import sum_parts, weight_grad_of_parts


@pytest.mark.parametrize("shape", [(1, 3), (5, 2, 3), (4, 0), (0, 3)])
def test_stored_or_added(shape: tuple[int, ...]) -> None:
    parts, held = torch.randn(shape), torch.randn(shape[1:])
    into = held.clone()
    sum_parts(parts, into)
    assert torch.equal(into, parts.sum(0))
    sum_parts(parts, into, accumulate=True)
    assert torch.equal(into, parts.sum(0) + parts.sum(0))


def test_a_narrow_place_is_rounded_once() -> None:
    """1 + 2^-8 rounds to 1 in bf16, and so does each sum on the way; all of them together do not."""
    parts, into = torch.full((4, 1), 2.0**-8), torch.ones(1, dtype=torch.bfloat16)
    sum_parts(parts, into, accumulate=True)
    assert into.item() == 1 + 2.0**-6


def test_a_gradient_goes_to_its_place_or_to_autograd() -> None:
    parts, weight, main_grad = torch.ones(3, 2), torch.zeros(2, dtype=torch.bfloat16), torch.ones(2)
    found = weight_grad_of_parts(parts, weight, None)
    assert found is not None
    assert found.dtype == weight.dtype
    assert found.tolist() == [3, 3]
    assert weight_grad_of_parts(parts, weight, lambda: (main_grad, True)) is None
    assert main_grad.tolist() == [4, 4]
    assert weight_grad_of_parts(parts, weight, lambda: (main_grad, False)) is None
    assert main_grad.tolist() == [3, 3]
