"""The two passes of the routed part of a layer on one rank, without autograd.

    forward    h, a = up(x)       y = down(a)        out = sum over choices of score * y
    backward   dh, score a, dscore = d_hidden(dout)  dW_down += dout^T (score a)
               dx rows = d_rows(dh)                  dW_up += dh^T x       dx = sum over choices

Kept for backward: x, h, the scores in row order and the grouping; no gathered copy, no a, no y. Who calls
them: `ops/routed_experts` in eager mode, `ops/registered` inside compiled graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeclipse.ops import expert_mlp
from moeclipse.ops.activation import Activation
from moeclipse.ops.bias import group_sum
from moeclipse.ops.combine import gather_sum
from moeclipse.ops.precision import wide_of
from moeclipse.ops.routing_metadata import Grouping
from moeclipse.ops.wgrad import grouped_wgrad


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The experts' parameters; also their gradients, in the same places."""

    up_EHD: torch.Tensor
    down_EDF: torch.Tensor
    up_bias_EH: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.up_EHD, self.down_EDF, self.up_bias_EH, self.down_bias_ED

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None]) -> Weights:
        up, down, up_bias, down_bias = tensors
        assert up is not None
        assert down is not None
        return cls(up_EHD=up, down_EDF=down, up_bias_EH=up_bias, down_bias_ED=down_bias)

    def empty_like(self) -> Weights:
        return Weights.of([None if t is None else torch.empty_like(t) for t in self.tensors()])


def forward_pass(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    weights: Weights,
    grouping: Grouping,
    activation: Activation = "swiglu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [T, D], h [M, H], the scores in row order)."""
    assert grouping.place_row_TK is not None
    wide = wide_of(scores_TK.dtype)
    scores_M = scores_TK.flatten().to(wide)[grouping.row_place_M]
    h_MH, a_MF = expert_mlp.up(
        x_TD.contiguous(),
        weights.up_EHD,
        grouping,
        grouping.row_token_M,
        activation=activation,
        bias_EH=weights.up_bias_EH,
    )
    y_MD = expert_mlp.down(a_MF, weights.down_EDF, grouping, bias_ED=weights.down_bias_ED)
    return gather_sum(y_MD, grouping.place_row_TK, scores_M), h_MH, scores_M


def backward_pass(
    d_out_TD: torch.Tensor,
    x_TD: torch.Tensor,
    h_MH: torch.Tensor,
    scores_M: torch.Tensor,
    weights: Weights,
    grads: Weights,
    grouping: Grouping,
    activation: Activation = "swiglu",
    *,
    accumulate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, d_scores); gradients of the weights are added to `grads`, or written where not `accumulate`."""
    d_out_TD, x_TD = d_out_TD.contiguous(), x_TD.contiguous()
    token_M, place_TK, offsets = grouping.row_token_M, grouping.place_row_TK, grouping.offsets_E1
    assert place_TK is not None
    d_h_MH, scaled_MF, d_score_M = expert_mlp.d_hidden(
        d_out_TD,
        scores_M,
        h_MH,
        weights.down_EDF,
        grouping,
        token_M,
        activation=activation,
        bias_ED=weights.down_bias_ED,
    )
    grouped_wgrad(d_out_TD, scaled_MF, offsets, grads.down_EDF, dy_index_M=token_M, accumulate=accumulate)
    del scaled_MF
    if grads.down_bias_ED is not None:
        into = grads.down_bias_ED
        group_sum(d_out_TD, grouping, into, index_M=token_M, weight_M=scores_M, accumulate=accumulate)
    if grads.up_bias_EH is not None:
        group_sum(d_h_MH, grouping, grads.up_bias_EH, accumulate=accumulate)
    dx_TD = gather_sum(expert_mlp.d_rows(d_h_MH, weights.up_EHD, grouping), place_TK)
    grouped_wgrad(d_h_MH, x_TD, offsets, grads.up_EHD, x_index_M=token_M, accumulate=accumulate)
    d_scores_TK = torch.where(place_TK >= 0, d_score_M[place_TK.clamp(min=0).long()], 0)
    return dx_TD, d_scores_TK
