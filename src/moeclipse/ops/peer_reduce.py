"""Sum what all ranks hold: the same bits whoever adds, because ranks are added in order.

    sum_ranks      out = round(x_0 + x_1 + ... + x_{P-1})          added from left to right in fp32
    add_rms_norm   h = round(residual + x_0 + ... ),  y = round(h / rms(h) * weight)

fp64 inputs are added in fp64. A result is rounded to the dtype of the inputs once, at the end, so two ranks
or eight lose the same single rounding. `h` is rounded before it is normalised: then it does not matter which
rank computed which rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 1 << 14  # elements added at a time: operands and fp32 temporaries stay in the first caches


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def part_bounds(length: int, num_ranks: int) -> list[int]:
    """Where each rank's part begins, and the end. The last rank takes the remainder: 403 over 4 ranks is
    [0, 100, 200, 300, 403]."""
    part = length // num_ranks
    return [rank * part for rank in range(num_ranks)] + [length]


def sum_ranks_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition, without a thought for speed."""
    total = parts[0].to(wide_of(parts[0].dtype))
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total.to(parts[0].dtype)


def sum_ranks(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Flat `parts` of equal length into `out`, which must not overlap any part after the second."""
    if len(parts) == 2:
        # torch computes a sum of two in fp32 and rounds once, so no temporary is needed.
        return torch.add(parts[0], parts[1], out=out)
    if out.dtype == wide_of(out.dtype):
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out
    length = out.numel()
    total = torch.empty(min(length, BLOCK), dtype=torch.float32)
    other = torch.empty_like(total)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        if stop - start < total.numel():
            total, other = total[: stop - start], other[: stop - start]
        total.copy_(parts[0][start:stop])
        for part in parts[1:]:
            other.copy_(part[start:stop])
            total.add_(other)
        out[start:stop].copy_(total)
    return out


def add_residual(parts: Sequence[torch.Tensor], residual: torch.Tensor) -> torch.Tensor:
    """h = round(residual + sum of the parts), added in that order of ranks, then the residual."""
    total = parts[0].to(wide_of(residual.dtype))
    for part in parts[1:]:
        total += part
    return (total + residual).to(residual.dtype)


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = h.to(wide_of(h.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(h.dtype)
