"""The type that sums are taken in."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.precision import wide_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_taken_in_fp32(dtype: torch.dtype) -> None:
    assert wide_of(dtype) is torch.float32


def test_fp64_stays_fp64() -> None:
    assert wide_of(torch.float64) is torch.float64
