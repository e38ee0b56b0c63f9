"""How far two results are apart, measured the way our promise is worded."""

from __future__ import annotations

import torch


def difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """max |difference| / max |reference|; where the reference is zero the value must be zero too."""
    assert value.shape == reference.shape, f"shapes differ: {tuple(value.shape)}, {tuple(reference.shape)}"
    if value.numel() == 0:
        return 0.0
    value, reference = value.detach().double(), reference.detach().double()
    apart = (value - reference).abs().max().item()
    scale = reference.abs().max().item()
    if apart == 0:
        return 0.0
    return apart / scale if scale else float("inf")
