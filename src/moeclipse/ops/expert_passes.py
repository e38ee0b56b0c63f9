"""The passes of experts over grouped rows on one rank, without autograd.

    forward    h, a = up(x)                          y = down(a)           out = sum over choices of score * y
    dgrad      dh, score a, dscore = d_hidden(dout)  dx rows = d_rows(dh)  dx = sum over choices
    wgrad      dW_down += dout^T (score a)           dW_up += dh^T x       and the sums of the biases

Kept for backward: x, h, the scores in row order and the grouping; no gathered copy, no a, no y. Who calls
them: `ops/grouped_experts` in eager mode, `ops/expert_operators` inside compiled graphs, `moe/fused` for rows
that came from other ranks. `backward` is dgrad and wgrad in the order that needs least memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeclipse.ops import expert_mlp
from moeclipse.ops.activation import Activation
from moeclipse.ops.bias import group_sum
from moeclipse.ops.combine import gather_sum
from moeclipse.ops.grouping import Grouping
from moeclipse.ops.pick import pick
from moeclipse.ops.precision import wide_of
from moeclipse.ops.wgrad import grouped_wgrad


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The experts' parameters."""

    up_EHD: torch.Tensor
    down_EDF: torch.Tensor
    up_bias_EH: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.up_EHD, self.down_EDF, self.up_bias_EH, self.down_bias_ED

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None]) -> ExpertWeights:
        """Of (up, down), or (up, down, up_bias, down_bias)."""
        up, down, up_bias, down_bias = (*tensors, None, None)[:4]
        assert up is not None
        assert down is not None
        return cls(up_EHD=up, down_EDF=down, up_bias_EH=up_bias, down_bias_ED=down_bias)

    def empty_grads(self, wanted: Sequence[bool] = (True,) * 4) -> ExpertGrads:
        """Places for gradients, of those that are wanted."""
        given = [t if asked else None for t, asked in zip(self.tensors(), wanted, strict=True)]
        return ExpertGrads.of([None if t is None else torch.empty_like(t) for t in given])


@dataclass(frozen=True, kw_only=True)
class ExpertGrads:
    """Where gradients of the experts' parameters go; None: nobody asked for that one."""

    up_EHD: torch.Tensor | None = None
    down_EDF: torch.Tensor | None = None
    up_bias_EH: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.up_EHD, self.down_EDF, self.up_bias_EH, self.down_bias_ED

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None]) -> ExpertGrads:
        """Of (up, down), or (up, down, up_bias, down_bias)."""
        up, down, up_bias, down_bias = (*tensors, None, None)[:4]
        return cls(up_EHD=up, down_EDF=down, up_bias_EH=up_bias, down_bias_ED=down_bias)


@dataclass(frozen=True, kw_only=True)
class ExpertState:
    """What forward keeps for backward."""

    x_TD: torch.Tensor
    h_MH: torch.Tensor
    scores_M: torch.Tensor
    grouping: Grouping
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class HiddenGrads:
    """What dgrad keeps for wgrad: products of rows that are gathered while loading are still to come."""

    state: ExpertState
    d_out_TD: torch.Tensor
    d_h_MH: torch.Tensor
    scaled_MF: torch.Tensor

    def add_to(self, *grads: torch.Tensor | None) -> None:
        """wgrad: add the gradients of (up, down), or of (up, down, up_bias, down_bias)."""
        into = ExpertGrads.of(grads)
        _down_wgrad(self.d_out_TD, self.scaled_MF, self.state, into)
        _up_wgrad(self.d_h_MH, self.state, into)


def in_row_order(scores_TK: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    assert grouping.row_place_M is not None
    return pick(scores_TK.flatten().to(wide_of(scores_TK.dtype)), grouping.row_place_M)


def forward(
    x_TD: torch.Tensor,
    scores_M: torch.Tensor,
    weights: ExpertWeights,
    grouping: Grouping,
    activation: Activation = "swiglu",
) -> tuple[torch.Tensor, ExpertState]:
    """(out [T, D], what backward needs)."""
    assert grouping.place_row_TK is not None
    h_MH, a_MF = expert_mlp.up(
        x_TD.contiguous(),
        weights.up_EHD,
        grouping,
        grouping.row_token_M,
        activation=activation,
        bias_EH=weights.up_bias_EH,
    )
    y_MD = expert_mlp.down(a_MF, weights.down_EDF, grouping, bias_ED=weights.down_bias_ED)
    state = ExpertState(x_TD=x_TD, h_MH=h_MH, scores_M=scores_M, grouping=grouping, activation=activation)
    return gather_sum(y_MD, grouping.place_row_TK, scores_M), state


def dgrad(
    d_out_TD: torch.Tensor, state: ExpertState, weights: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor, HiddenGrads]:
    """(dx, gradient of the scores in row order, what wgrad needs)."""
    d_out_TD = d_out_TD.contiguous()
    d_h_MH, scaled_MF, d_score_M = _d_hidden(d_out_TD, state, weights)
    hidden = HiddenGrads(state=state, d_out_TD=d_out_TD, d_h_MH=d_h_MH, scaled_MF=scaled_MF)
    return _d_x(d_h_MH, state, weights), d_score_M, hidden


def backward(
    d_out_TD: torch.Tensor,
    state: ExpertState,
    weights: ExpertWeights,
    grads: ExpertGrads,
    *,
    accumulate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, d_scores_TK); gradients of the weights are added to `grads`, or written where not `accumulate`."""
    d_out_TD, place_TK = d_out_TD.contiguous(), state.grouping.place_row_TK
    assert place_TK is not None
    d_h_MH, scaled_MF, d_score_M = _d_hidden(d_out_TD, state, weights)
    _down_wgrad(d_out_TD, scaled_MF, state, grads, accumulate)
    del scaled_MF
    dx_TD = _d_x(d_h_MH, state, weights)
    _up_wgrad(d_h_MH, state, grads, accumulate)
    return dx_TD, pick(d_score_M, place_TK)


def _d_hidden(
    d_out_TD: torch.Tensor, state: ExpertState, weights: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return expert_mlp.d_hidden(
        d_out_TD,
        state.scores_M,
        state.h_MH,
        weights.down_EDF,
        state.grouping,
        state.grouping.row_token_M,
        activation=state.activation,
        bias_ED=weights.down_bias_ED,
    )


def _d_x(d_h_MH: torch.Tensor, state: ExpertState, weights: ExpertWeights) -> torch.Tensor:
    assert state.grouping.place_row_TK is not None
    d_rows_MD = expert_mlp.d_rows(d_h_MH, weights.up_EHD, state.grouping)
    return gather_sum(d_rows_MD, state.grouping.place_row_TK)


def _down_wgrad(
    d_out_TD: torch.Tensor,
    scaled_MF: torch.Tensor,
    state: ExpertState,
    grads: ExpertGrads,
    accumulate: bool = True,
) -> None:
    grouping, token_M = state.grouping, state.grouping.row_token_M
    offsets_E1, into = grouping.offsets_E1, grads.down_EDF
    if into is not None:
        grouped_wgrad(d_out_TD, scaled_MF, offsets_E1, into, dy_index_M=token_M, accumulate=accumulate)
    if grads.down_bias_ED is not None:
        into, scores_M = grads.down_bias_ED, state.scores_M
        group_sum(d_out_TD, grouping, into, index_M=token_M, weight_M=scores_M, accumulate=accumulate)


def _up_wgrad(d_h_MH: torch.Tensor, state: ExpertState, grads: ExpertGrads, accumulate: bool = True) -> None:
    grouping, x_TD = state.grouping, state.x_TD.contiguous()
    offsets_E1, token_M = grouping.offsets_E1, grouping.row_token_M
    if grads.up_EHD is not None:
        grouped_wgrad(d_h_MH, x_TD, offsets_E1, grads.up_EHD, x_index_M=token_M, accumulate=accumulate)
    if grads.up_bias_EH is not None:
        group_sum(d_h_MH, grouping, grads.up_bias_EH, accumulate=accumulate)
