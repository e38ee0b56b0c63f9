"""The type that sums and gates are computed in."""

from __future__ import annotations

import torch


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
