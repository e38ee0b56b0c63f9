"""Biases of experts: their gradients, and what they add to the gradient of a score.

    h_m = x_m W_up^T + b_up_e       d b_up_e   = sum over e's rows of dh_m
    y_m = a_m W_down^T + b_down_e   d b_down_e = sum over e's rows of score_m dout_m
                                    d score_m  = <dout_m, a_m W_down^T> + <dout_m, b_down_e>

Contract: `group_sum` adds in fp32 (fp64 for fp64 rows) and rounds once; `index_M` names the row that stands
at each place, so that a gathered copy never exists. The kernel path reads nothing on the host.
"""

from __future__ import annotations

import torch

from moeclipse.ops.grouping import Grouping
from moeclipse.ops.precision import WIDE


def expert_of_rows(grouping: Grouping) -> torch.Tensor:
    """Of each row its expert; rows that are not in use count as the last expert's."""
    row_M = torch.arange(grouping.num_rows, dtype=torch.int32, device=grouping.offsets_E1.device)
    expert_M = torch.searchsorted(grouping.offsets_E1[1:].contiguous(), row_M, right=True)
    return expert_M.clamp(max=len(grouping.counts_E) - 1)


def add_bias(rows_MN: torch.Tensor, bias_EN: torch.Tensor | None, grouping: Grouping) -> torch.Tensor:
    return rows_MN if bias_EN is None else rows_MN + bias_EN[expert_of_rows(grouping)]


def bias_dots(
    dy: torch.Tensor, bias_ED: torch.Tensor, grouping: Grouping, index_M: torch.Tensor | None = None
) -> torch.Tensor:
    """<dy_m, bias of m's expert> for each row, in fp32 or wider."""
    if dy.is_cuda and dy.dtype in (torch.bfloat16, torch.float16) and bias_ED.dtype == dy.dtype:
        dots = torch.mm(dy, bias_ED.t(), out_dtype=torch.float32)
    else:
        wide = WIDE[dy.dtype]
        dots = dy.to(wide) @ bias_ED.to(wide).t()
    rows_M = torch.arange(grouping.num_rows, device=dy.device) if index_M is None else index_M.long()
    return dots[rows_M, expert_of_rows(grouping)]


def group_sum_reference(
    rows: torch.Tensor,
    grouping: Grouping,
    into_EN: torch.Tensor,
    *,
    index_M: torch.Tensor | None = None,
    weight_M: torch.Tensor | None = None,
    accumulate: bool = True,
) -> None:
    wide = WIDE[rows.dtype]
    used = int(grouping.offsets_E1[-1])
    values = (rows if index_M is None else rows[index_M.long()])[:used].to(wide)
    if weight_M is not None:
        values = values * weight_M[:used, None].to(wide)
    sums = into_EN.to(wide) if accumulate else torch.zeros_like(into_EN, dtype=wide)
    into_EN.copy_(sums.index_add(0, expert_of_rows(grouping)[:used], values))


def group_sum(
    rows: torch.Tensor,
    grouping: Grouping,
    into_EN: torch.Tensor,
    *,
    index_M: torch.Tensor | None = None,
    weight_M: torch.Tensor | None = None,
    accumulate: bool = True,
) -> None:
    """into[e] += the sum of e's rows, weighted; without `accumulate` it is overwritten."""
    fits = rows.is_cuda and rows.numel() > 0 and rows.dtype.itemsize < 8 and into_EN.is_contiguous()
    picked = group_sum_kernel if fits else group_sum_reference
    picked(rows, grouping, into_EN, index_M=index_M, weight_M=weight_M, accumulate=accumulate)


def group_sum_kernel(
    rows: torch.Tensor,
    grouping: Grouping,
    into_EN: torch.Tensor,
    *,
    index_M: torch.Tensor | None = None,
    weight_M: torch.Tensor | None = None,
    accumulate: bool = True,
) -> None:
    from moeclipse.ops.triton import bias

    rows = rows.contiguous()
    num_experts, N = into_EN.shape
    weight_M = None if weight_M is None else weight_M.contiguous()
    block = 64
    bias.sum_groups[(num_experts, -(-N // block))](
        rows, index_M, weight_M, into_EN, grouping.offsets_E1, rows.stride(0), N,
        GATHER=index_M is not None, WEIGHTED=weight_M is not None, ADD=accumulate, BLOCK_M=32, BLOCK=block,
    )  # fmt: skip
