"""RMSNorm and the sum in front of it: by their definition, for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moeclipse.ops.norm import add_norm, rms_norm
from moeclipse.testing.compare import difference


@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (4, 3, 6)])
def test_rows_are_scaled_to_unit_squares(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    found = rms_norm(x, weight, 1e-5)
    assert found.shape == shape
    assert difference(found, F.rms_norm(x, (6,), weight, 1e-5)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_sum_that_goes_on_is_the_one_that_is_normed(dtype: torch.dtype) -> None:
    a, b = (torch.randn(5, 8, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(8, dtype=torch.float64).to(dtype)
    total, out = add_norm(a, b, weight, 1e-5)
    assert torch.equal(total, a + b)
    assert torch.equal(out, rms_norm(a + b, weight, 1e-5))


def test_types_that_differ_are_promoted_as_torch_does() -> None:
    """Under autocast activations are narrow and weights are not."""
    out = rms_norm(torch.randn(3, 4).bfloat16(), torch.ones(4), 1e-5)
    assert out.dtype == torch.float32
    total, _ = add_norm(torch.randn(3, 4), torch.randn(3, 4).bfloat16(), torch.ones(4), 1e-5)
    assert total.dtype == torch.float32
