"""The routed part of a MoE layer on one rank: gate's choice in, weighted sum of experts out.

    forward    h, a = up(x)       y = down(a)        out = sum over choices of score * y
    backward   dh, score a, dscore = d_hidden(dout)  dW_down += dout^T (score a)
               dx rows = d_rows(dh)                  dW_up += dh^T x       dx = sum over choices

Kept for backward: x, h, the scores in row order and the grouping; no gathered copy, no a, no y.
`into` names fp32 sums that the weight gradients are added to; without them autograd gets fresh gradients
in the weights' type. `routed_experts_reference` is the same function in plain torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moeclipse.ops import expert_mlp
from moeclipse.ops.activation import swiglu
from moeclipse.ops.combine import gather_sum
from moeclipse.ops.routing_metadata import Grouping, group_rows
from moeclipse.ops.wgrad import grouped_wgrad

Into = tuple[torch.Tensor, torch.Tensor] | None


def routed_experts_reference(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    up_EHD: torch.Tensor,
    down_EDF: torch.Tensor,
) -> torch.Tensor:
    """One expert after the other; autograd does the rest."""
    out = torch.zeros_like(x_TD, dtype=torch.promote_types(x_TD.dtype, torch.float32))
    for expert, (up_HD, down_DF) in enumerate(zip(up_EHD, down_EDF, strict=True)):
        token, choice = (expert_ids_TK == expert).nonzero(as_tuple=True)
        y = swiglu(x_TD[token] @ up_HD.t()) @ down_DF.t()
        out = out.index_add(0, token, y.to(out.dtype) * scores_TK[token, choice].to(out.dtype)[:, None])
    return out.to(x_TD.dtype)


def routed_experts(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    up_EHD: torch.Tensor,
    down_EDF: torch.Tensor,
    *,
    into: Into = None,
) -> torch.Tensor:
    """out [T, D]. Differentiable in x, the scores and both weights."""
    grouping = group_rows(expert_ids_TK, len(up_EHD))
    return _RoutedExperts.apply(x_TD, scores_TK, up_EHD, down_EDF, grouping, into)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        up_EHD: torch.Tensor,
        down_EDF: torch.Tensor,
        grouping: Grouping,
        into: Into,
    ) -> torch.Tensor:
        assert grouping.place_row_TK is not None
        x_TD = x_TD.contiguous()
        wide = torch.promote_types(scores_TK.dtype, torch.float32)
        scores_M = scores_TK.flatten().to(wide)[grouping.row_place_M]
        h_MH, a_MF = expert_mlp.up(x_TD, up_EHD, grouping, grouping.row_token_M)
        y_MD = expert_mlp.down(a_MF, down_EDF, grouping)
        ctx.save_for_backward(x_TD, h_MH, scores_M, up_EHD, down_EDF)
        ctx.grouping, ctx.into, ctx.scores_dtype = grouping, into, scores_TK.dtype
        return gather_sum(y_MD, grouping.place_row_TK, scores_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TD: torch.Tensor) -> tuple[Any, ...]:
        x_TD, h_MH, scores_M, up_EHD, down_EDF = ctx.saved_tensors
        grouping: Grouping = ctx.grouping
        d_out_TD = d_out_TD.contiguous()
        token_M, place_TK, offsets = grouping.row_token_M, grouping.place_row_TK, grouping.offsets_E1
        assert place_TK is not None
        d_h_MH, scaled_MF, d_score_M = expert_mlp.d_hidden(
            d_out_TD, scores_M, h_MH, down_EDF, grouping, token_M
        )
        fresh = ctx.into is None
        d_up, d_down = (torch.empty_like(up_EHD), torch.empty_like(down_EDF)) if fresh else ctx.into
        grouped_wgrad(d_out_TD, scaled_MF, offsets, d_down, dy_index_M=token_M, accumulate=not fresh)
        del scaled_MF
        dx_TD = gather_sum(expert_mlp.d_rows(d_h_MH, up_EHD, grouping), place_TK)
        grouped_wgrad(d_h_MH, x_TD, offsets, d_up, x_index_M=token_M, accumulate=not fresh)
        d_scores_TK = torch.where(place_TK >= 0, d_score_M[place_TK.clamp(min=0).long()], 0)
        weights = (d_up, d_down) if fresh else (None, None)
        return dx_TD, d_scores_TK.to(ctx.scores_dtype), *weights, None, None
