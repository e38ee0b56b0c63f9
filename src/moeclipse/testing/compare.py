"""How far two results are apart, measured the way our promise is worded."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def difference(value: torch.Tensor | Sequence[float], reference: torch.Tensor | Sequence[float]) -> float:
    """max |difference| / max |reference|; where the reference is zero the value must be zero too.

    Plain numbers, like losses, are compared in float64: a tensor of them would be of float32.
    """
    value, reference = (torch.as_tensor(given, dtype=_double(given)) for given in (value, reference))
    assert value.shape == reference.shape, f"shapes differ: {tuple(value.shape)}, {tuple(reference.shape)}"
    if value.numel() == 0:
        return 0.0
    value, reference = value.detach().double(), reference.detach().double()
    apart = (value - reference).abs().max().item()
    scale = reference.abs().max().item()
    if apart == 0:
        return 0.0
    return apart / scale if scale else float("inf")


def _double(given: torch.Tensor | Sequence[float]) -> torch.dtype:
    return given.dtype if isinstance(given, torch.Tensor) else torch.float64
