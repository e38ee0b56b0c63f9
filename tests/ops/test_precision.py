"""The type that sums are taken in."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.precision import WIDE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8])
def test_sums_are_taken_in_fp32(dtype: torch.dtype) -> None:
    assert WIDE[dtype] is torch.float32


def test_fp64_stays_fp64() -> None:
    assert WIDE[torch.float64] is torch.float64
