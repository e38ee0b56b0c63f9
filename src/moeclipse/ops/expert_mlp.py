"""Experts over rows grouped by expert, in as few passes over memory as there are matrix products.

    up         h_m = x W_up_e^T + b_up_e,  a_m = f(h_m)          x_m, or x[index_m] gathered while loading
    down       y_m = a_m W_down_e^T + b_down_e
    d_hidden   dA = dy W_down_e, then dh, score x a and the score gradient, from h alone
    d_rows     dx_m = dh_m W_up_e
    narrow     u_m = s x_m A_e^T, or s x_m B_e                   few columns: the first product of an adapter

Each of the other four takes one more product into its sum, u_m B_e^T or u_m A_e: an adapter's second one
(`ops/low_rank`). The kernels are launched by `ops/expert_kernels`.

Contract: W_up is [E, H, D], W_down [E, D, F]; H is 2F for gated activations (gate rows first), else F;
`grouping` says which rows are whose; biases are optional. Only x and h are needed for backward: a is rebuilt,
y and its gradient are never kept. Rows past the last expert's are not written.

Hazard: widths must be multiples of 8 and rows bf16 or fp16 for the kernels; everything else takes the
reference, which loops over experts and reads counts on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.core.shown import warn
from moeclipse.ops.activation import GATED, Activation, activate, activate_backward
from moeclipse.ops.bias import add_bias, bias_dots
from moeclipse.ops.expert_kernels import (
    More,
    d_hidden_kernel,
    d_rows_kernel,
    down_kernel,
    narrow_kernel,
    up_kernel,
)
from moeclipse.ops.grouped_gemm import grouped_mm_reference
from moeclipse.ops.grouping import Grouping
from moeclipse.ops.precision import WIDE
from moeclipse.ops.tuning import device_fits

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def up_reference(
    x: torch.Tensor,
    up_EHD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    bias_EH: torch.Tensor | None = None,
    more: More | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x if index_M is None else x[index_M.long()]
    h = add_bias(_products(rows, up_EHD, grouping, more, transposed=True), bias_EH, grouping)
    return h, activate(h, activation)


def down_reference(
    a_MF: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    *,
    bias_ED: torch.Tensor | None = None,
    more: More | None = None,
) -> torch.Tensor:
    return add_bias(_products(a_MF, down_EDF, grouping, more, transposed=True), bias_ED, grouping)


def d_hidden_reference(
    dy: torch.Tensor,
    scores_M: torch.Tensor,
    h_MH: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    more: More | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = dy if index_M is None else dy[index_M.long()]
    d_a = _products(rows, down_EDF, grouping, more)
    wide = WIDE[dy.dtype]
    scores, d_a = scores_M.to(wide)[:, None], d_a.to(wide)
    d_h, a = activate_backward(d_a * scores, h_MH.to(wide), activation)
    return d_h.to(dy.dtype), (a * scores).to(dy.dtype), (d_a * a).sum(1)


def d_rows_reference(
    d_h_MH: torch.Tensor, up_EHD: torch.Tensor, grouping: Grouping, *, more: More | None = None
) -> torch.Tensor:
    return _products(d_h_MH, up_EHD, grouping, more)


def narrow_reference(
    rows: torch.Tensor,
    weight: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    scale: float,
    transposed: bool,
) -> torch.Tensor:
    return scale * _products(
        rows if index_M is None else rows[index_M.long()], weight, grouping, transposed=transposed
    )


def _products(
    rows: torch.Tensor,
    weight: torch.Tensor,
    grouping: Grouping,
    more: More | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """rows_m W_e, or rows_m W_e^T; zeros for rows past the last expert's."""
    used = sum(counts := grouping.counts_E.tolist())
    out = grouped_mm_reference(rows[:used], weight.transpose(1, 2) if transposed else weight, counts)
    if more is not None:
        out = out + _products(more.rows_MR[:used], more.weight, grouping, transposed=transposed)[:used]
    if used == len(rows):
        return out
    return torch.cat([out, out.new_zeros(len(rows) - used, out.shape[1])])


def up(
    x: torch.Tensor,
    up_EHD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    bias_EH: torch.Tensor | None = None,
    more: More | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h [M, H], a [M, F])."""
    # Both halves of h are addressed by themselves, so each must begin on 16 bytes.
    fits = mlp_fits(x, up_EHD, grouping) and (activation not in GATED or up_EHD.shape[1] % 16 == 0)
    picked = up_kernel if fits else up_reference
    return picked(x, up_EHD, grouping, index_M, activation=activation, bias_EH=bias_EH, more=more)


def down(
    a_MF: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    *,
    bias_ED: torch.Tensor | None = None,
    more: More | None = None,
) -> torch.Tensor:
    """y [M, D], not yet weighted by scores."""
    picked = down_kernel if mlp_fits(a_MF, down_EDF, grouping) else down_reference
    return picked(a_MF, down_EDF, grouping, bias_ED=bias_ED, more=more)


def d_hidden(
    dy: torch.Tensor,
    scores_M: torch.Tensor,
    h_MH: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    bias_ED: torch.Tensor | None = None,
    more: More | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(d_h [M, H], score x a [M, F], d_score [M]) from the gradient of the weighted sum of rows."""
    picked = d_hidden_kernel if mlp_fits(dy, down_EDF, grouping) else d_hidden_reference
    how: dict[str, Any] = {"activation": activation, "more": more}
    d_h, scaled, d_score = picked(dy, scores_M, h_MH, down_EDF, grouping, index_M, **how)
    if bias_ED is not None:
        d_score = d_score + bias_dots(dy, bias_ED, grouping, index_M)
    return d_h, scaled, d_score


def d_rows(
    d_h_MH: torch.Tensor, up_EHD: torch.Tensor, grouping: Grouping, *, more: More | None = None
) -> torch.Tensor:
    """dx [M, D], one for each row."""
    picked = d_rows_kernel if mlp_fits(d_h_MH, up_EHD, grouping) else d_rows_reference
    return picked(d_h_MH, up_EHD, grouping, more=more)


def narrow(
    rows: torch.Tensor,
    weight: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    scale: float,
    transposed: bool,
) -> torch.Tensor:
    """u [M, R] = scale x rows_m A_e^T where `transposed` (A is [E, R, K]), else scale x rows_m B_e."""
    picked = narrow_kernel if mlp_fits(rows, weight, grouping) else narrow_reference
    return picked(rows, weight, grouping, index_M, scale=scale, transposed=transposed)


def mlp_fits(rows: torch.Tensor, weight: torch.Tensor, grouping: Grouping) -> bool:
    """Whether the kernels take these operands; on CUDA a refusal is told once."""
    if not rows.is_cuda or len(rows) == 0 or grouping.num_rows == 0:
        return False
    fits = (
        grouping.tiles_3C is not None
        and rows.dtype in KERNEL_DTYPES
        and weight.dtype == rows.dtype
        and weight.is_contiguous()
        and rows.stride(1) == 1
        and rows.stride(0) % 8 == 0
        and rows.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
        and weight.shape[2] % 8 == 0
        and device_fits(rows.device)
    )
    if not fits:
        warn(
            f"experts of {rows.dtype} with weights {tuple(weight.shape)} run in plain torch: the kernels take"
            " bf16 and fp16, contiguous, with widths that are multiples of 8, on NVIDIA's GPUs from Ampere on"
            " and on MI300X",
            stacklevel=3,
        )
    return fits
