"""One matrix product for each group of rows, all in one call.

Rows are grouped: the first counts[0] belong to expert 0, the next counts[1] to expert 1, ... Groups may
be empty. The reference loops; on CUDA torch's grouped kernel does all groups at once where it can
(bf16 operands, widths that are multiples of 8). One group alone is one product, and no count leaves the host.

    forward   y_n  = x_n  W_e^T        W_EOI [experts, out, in]
    dgrad     dx_n = dy_n W_e
    wgrad     dW_e += dy_e^T x_e
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from moeclipse.ops.wgrad import dense_wgrad, grouped_wgrad, grouped_wgrad_reference


def grouped_mm(x_NI: torch.Tensor, weight_EOI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """y_NO: each row times the transposed weight of its expert."""
    return _grouped(x_NI, weight_EOI.transpose(1, 2), counts)


def grouped_mm_dgrad(dy_NO: torch.Tensor, weight_EOI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """dx_NI: each row times the weight of its expert."""
    return _grouped(dy_NO, weight_EOI, counts)


def grouped_mm_reference(x_NI: torch.Tensor, weight_EIO: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    out = x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])
    start = 0
    for weight_IO, count in zip(weight_EIO, counts, strict=True):
        if count:
            torch.mm(x_NI[start : start + count], weight_IO, out=out[start : start + count])
        start += count
    return out


def _grouped(x_NI: torch.Tensor, weight_EIO: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    if len(counts) == 1:
        return x_NI @ weight_EIO[0]
    if _has_kernel(x_NI, weight_EIO):
        ends = torch.tensor(counts, device=x_NI.device).cumsum(0).to(torch.int32)
        return F.grouped_mm(x_NI, weight_EIO, offs=ends)
    return grouped_mm_reference(x_NI, weight_EIO, counts)


def _has_kernel(x_NI: torch.Tensor, weight_EIO: torch.Tensor) -> bool:
    return (
        x_NI.is_cuda
        and x_NI.dtype == torch.bfloat16
        and x_NI.shape[0] > 0
        and x_NI.shape[1] % 8 == 0
        and weight_EIO.shape[2] % 8 == 0
        and hasattr(F, "grouped_mm")
    )


def grouped_mm_wgrad(
    dy_NO: torch.Tensor,
    x_NI: torch.Tensor,
    counts: Sequence[int],
    *,
    into: torch.Tensor,
    kernels: bool = True,
) -> None:
    """Add dy_e^T x_e to into[e]; an expert without rows adds nothing."""
    if len(counts) == 1:
        dense_wgrad(dy_NO, x_NI, into[0])
        return
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=dy_NO.device)
    (grouped_wgrad if kernels else grouped_wgrad_reference)(dy_NO, x_NI, offsets, into)
