"""Sums that many programs left in parts, added up in one order: [P, ...] -> [...], into a place or a new one.

    into = sum over p of parts_p            or, to accumulate,   into += sum over p of parts_p

Contract. The sum is fp32 (fp64 for fp64 parts) and rounded once, to the type of `into`. Two runs give the
same bits. A `Place` says where a gradient goes when it is there: (main_grad, whether to add to what it
holds); who asks must write it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Place = Callable[[], tuple[torch.Tensor, bool]]
TILE = 4096
"""Numbers that one program holds at once."""


def sum_parts_reference(parts_P: torch.Tensor, into: torch.Tensor, *, accumulate: bool) -> None:
    total = parts_P.sum(0)
    into.copy_((into.to(total.dtype) + total if accumulate else total).view(into.shape))


def sum_parts(parts_P: torch.Tensor, into: torch.Tensor, *, accumulate: bool = False) -> None:
    """`into` has as many numbers as each of the parts."""
    fits = parts_P.is_cuda and parts_P.numel() > 0 and parts_P.dtype == torch.float32
    picked = sum_parts_kernel if fits and into.is_contiguous() else sum_parts_reference
    picked(parts_P, into, accumulate=accumulate)


def weight_grad_of_parts(
    parts_P: torch.Tensor, weight: torch.Tensor, place: Place | None
) -> torch.Tensor | None:
    """The gradient of `weight` for autograd; None where it went to its place."""
    into, accumulate = (torch.empty_like(weight), False) if place is None else place()
    sum_parts(parts_P, into, accumulate=accumulate)
    return into if place is None else None


def sum_parts_kernel(parts_P: torch.Tensor, into: torch.Tensor, *, accumulate: bool) -> None:
    from moeclipse.ops.triton import sum_parts as kernels

    parts_PN = parts_P.contiguous().view(len(parts_P), -1)
    (P, N), rows = parts_PN.shape, min(128, 1 << max(len(parts_P) - 1, 1).bit_length())
    columns = TILE // rows
    kernels.sum_parts[(-(-N // columns),)](
        parts_PN, into, P, N, ADD=accumulate, ROWS=rows, COLUMNS=columns, num_warps=8
    )
