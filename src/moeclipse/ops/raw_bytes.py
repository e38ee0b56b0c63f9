"""The bytes of a tensor, for whoever moves memory and does not care what is in it.

Hazard: a dimension of size one may have any stride in a tensor that counts as contiguous, and keeps it
through `view`, which then refuses to read another type. So a single row needs more care than many.
"""

from __future__ import annotations

import torch


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat; in the same memory, where that is contiguous."""
    x = x.detach().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
