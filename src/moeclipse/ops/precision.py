"""The type that sums and gates are computed in: fp32, or fp64 for fp64."""

from __future__ import annotations

import torch

WIDE: dict[torch.dtype, torch.dtype] = {
    dtype: torch.float64 if dtype == torch.float64 else torch.float32
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""Of each type: codes of frozen weights, which are whole numbers, lie in buckets as weights do."""
