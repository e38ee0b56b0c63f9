"""Sum rows that belong together, with weights, in a wider type.

    sum_rows     out_r = sum over i with index_i = r of weight_i * rows_i        any index
    gather_sum   out_t = sum over k of weight * rows at place_tk                   the inverse index is known

Rows are added in a fixed order, in fp32 (fp64 for fp64 rows), and rounded once.
"""

from __future__ import annotations

import torch

from moeclipse.ops.launch import launch
from moeclipse.ops.precision import WIDE


def sum_rows(
    rows_MD: torch.Tensor, index_M: torch.Tensor, num_rows: int, weight_M: torch.Tensor | None = None
) -> torch.Tensor:
    """out [num_rows, D] in the dtype of `rows_MD`; a row that nothing points at is zero."""
    wide = WIDE[rows_MD.dtype]
    values_MD = rows_MD.to(wide)
    if weight_M is not None:
        values_MD = values_MD * weight_M.to(wide)[:, None]
    out = torch.zeros((num_rows, *rows_MD.shape[1:]), dtype=wide, device=rows_MD.device)
    out.index_add_(0, index_M, values_MD)
    return out.to(rows_MD.dtype)


def gather_sum_reference(
    rows_MD: torch.Tensor, place_row_TK: torch.Tensor, weight_M: torch.Tensor | None = None
) -> torch.Tensor:
    wide = WIDE[rows_MD.dtype]
    out = torch.zeros(len(place_row_TK), rows_MD.shape[1], dtype=wide, device=rows_MD.device)
    for row_T in place_row_TK.long().unbind(1) if len(rows_MD) else ():
        used_T, row_T = row_T >= 0, row_T.clamp(min=0)
        values_TD = rows_MD[row_T].to(wide)
        if weight_M is not None:
            values_TD = values_TD * weight_M[row_T].to(wide)[:, None]
        out += torch.where(used_T[:, None], values_TD, 0)
    return out.to(rows_MD.dtype)


def gather_sum(
    rows_MD: torch.Tensor, place_row_TK: torch.Tensor, weight_M: torch.Tensor | None = None
) -> torch.Tensor:
    """out [T, D]: of each token the sum of its rows, weighted; a place of -1 adds nothing."""
    fits = rows_MD.is_cuda and rows_MD.numel() > 0 and rows_MD.dtype.itemsize < 8
    return (gather_sum_kernel if fits else gather_sum_reference)(rows_MD, place_row_TK, weight_M)


def gather_sum_kernel(
    rows_MD: torch.Tensor, place_row_TK: torch.Tensor, weight_M: torch.Tensor | None = None
) -> torch.Tensor:
    from moeclipse.ops.triton import combine

    rows_MD, place_row_TK = rows_MD.contiguous(), place_row_TK.contiguous()
    # Scores that travelled beside other numbers arrive as a column: every second element.
    weight_M = None if weight_M is None else weight_M.contiguous()
    (num_tokens, top_k), D = place_row_TK.shape, rows_MD.shape[1]
    out = rows_MD.new_empty(num_tokens, D)
    block = min(2048, 1 << (D - 1).bit_length())
    launch(
        combine.gather_sum, (num_tokens, -(-D // block)),
        rows_MD, place_row_TK, weight_M, out, rows_MD.stride(0), D,
        K=top_k, WEIGHTED=weight_M is not None, BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return out
