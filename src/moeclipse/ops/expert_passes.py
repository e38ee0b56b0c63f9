"""The passes of experts over grouped rows on one rank, without autograd.

    forward    h, a = up(x)                          y = down(a)           out = sum over choices of score * y
    dgrad      dh, score a, dscore = d_hidden(dout)  dx rows = d_rows(dh)  dx = sum over choices
    wgrad      dW_down += dout^T (score a)           dW_up += dh^T x       and the sums of the biases

Either weight may have an adapter (`ops/low_rank`), whose products join the same sums; then gradients of A and
B are added like those of W, and usually those of W are not wanted.

W_up and W_down may be `Frozen` (`ops/frozen`): decoded before the product that reads them, in each direction.

Kept for backward: x, h, the scores in row order and the grouping; no gathered copy, no a, no y. So where
experts run a second time for backward alone (`recompute`), there is no second product.

Who calls them: `ops/grouped_experts` in eager mode, `ops/expert_operators` inside compiled graphs,
`moe/experts/fused` for rows that came from other ranks. `backward` is dgrad and wgrad in the order that needs
least memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from moeclipse.ops import expert_mlp
from moeclipse.ops.activation import Activation
from moeclipse.ops.bias import group_sum
from moeclipse.ops.combine import gather_sum
from moeclipse.ops.frozen import Frozen, Weight, decoded
from moeclipse.ops.grouped_gemm import grouped_wgrad
from moeclipse.ops.grouping import Grouping
from moeclipse.ops.low_rank import LowRank, add_wgrad
from moeclipse.ops.pick import pick
from moeclipse.ops.precision import WIDE

WEIGHTS = ("up_EHD", "down_EDF")
BIASES = ("up_bias_EH", "down_bias_ED")
ADAPTERS = ("up_a_ERD", "up_b_EHR", "down_a_ERF", "down_b_EDR")
NAMES = (*WEIGHTS, *BIASES, *ADAPTERS)
"""The parameters that experts may have, in their order."""


@dataclass(frozen=True, kw_only=True)
class ExpertGrads:
    """Where gradients of the experts' parameters go; None: nobody asked for that one."""

    up_EHD: torch.Tensor | None = None
    down_EDF: torch.Tensor | None = None
    up_bias_EH: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    up_a_ERD: torch.Tensor | None = None
    up_b_EHR: torch.Tensor | None = None
    down_a_ERF: torch.Tensor | None = None
    down_b_EDR: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(getattr(self, name) for name in NAMES)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None], names: Sequence[str] = NAMES) -> ExpertGrads:
        """Of the first so many, or of those that are named."""
        return cls(**dict(zip(names, tensors, strict=names is not NAMES)))


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The experts' parameters; biases and adapters are optional."""

    up_EHD: Weight
    down_EDF: Weight
    up_bias_EH: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    up_a_ERD: torch.Tensor | None = None
    up_b_EHR: torch.Tensor | None = None
    down_a_ERF: torch.Tensor | None = None
    down_b_EDR: torch.Tensor | None = None
    scale: float = 1.0
    """Of what adapters add."""

    @classmethod
    def of(
        cls, tensors: Sequence[Weight | None], names: Sequence[str] = NAMES, scale: float = 1.0
    ) -> ExpertWeights:
        """Of the first so many, or of those that are named."""
        named: dict[str, Any] = dict(zip(names, tensors, strict=names is not NAMES))
        return cls(**named, scale=scale)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Those that may have a gradient."""
        given = (getattr(self, name) for name in NAMES)
        return tuple(None if isinstance(weight, Frozen) else weight for weight in given)

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that are there and may have a gradient."""
        return tuple(name for name, weight in zip(NAMES, self.tensors(), strict=True) if weight is not None)

    @functools.cached_property
    def up_adapter(self) -> LowRank | None:
        return LowRank.of(self.up_a_ERD, self.up_b_EHR, self.scale)

    @functools.cached_property
    def down_adapter(self) -> LowRank | None:
        return LowRank.of(self.down_a_ERF, self.down_b_EDR, self.scale)

    def empty_grads(self, wanted: Sequence[bool] = (True,) * len(NAMES)) -> ExpertGrads:
        """Places for gradients, of those that are wanted."""
        given = [t if asked else None for t, asked in zip(self.tensors(), wanted, strict=True)]
        return ExpertGrads.of([None if t is None else torch.empty_like(t) for t in given])


@dataclass(frozen=True, kw_only=True)
class ExpertState:
    """What forward keeps for backward."""

    x_TD: torch.Tensor
    h_MH: torch.Tensor
    u_MR: torch.Tensor | None = None
    """Of the up-projection's adapter."""
    scores_M: torch.Tensor
    grouping: Grouping
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class HiddenGrads:
    """What dgrad keeps for wgrad: products of rows that are gathered while loading are still to come."""

    state: ExpertState
    weights: ExpertWeights
    d_out_TD: torch.Tensor
    d_h_MH: torch.Tensor
    scaled_MF: torch.Tensor
    """score x a"""
    d_inner: DInner

    def add_to(self, *grads: torch.Tensor | None) -> None:
        """wgrad: add the gradients of the parameters that these experts have."""
        into = ExpertGrads.of(grads, self.weights.names)
        _down_wgrad(self, into)
        _up_wgrad(self, into)


class DInner(NamedTuple):
    """Gradients of what adapters have inside; None: there is no such adapter."""

    up_MR: torch.Tensor | None
    down_MR: torch.Tensor | None
    """Not yet multiplied by scores."""


def in_row_order(scores_TK: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    assert grouping.row_place_M is not None
    return pick(scores_TK.reshape(-1), grouping.row_place_M, WIDE[scores_TK.dtype])


def forward(
    x_TD: torch.Tensor,
    scores_M: torch.Tensor,
    weights: ExpertWeights,
    grouping: Grouping,
    activation: Activation = "swiglu",
) -> tuple[torch.Tensor, ExpertState]:
    """(out [T, D], what backward needs)."""
    assert grouping.place_row_TK is not None
    a_MF, state = _hidden(x_TD, scores_M, weights, grouping, activation)
    down = weights.down_adapter
    more = None if down is None else down.forward(down.inner(a_MF, grouping))
    down_EDF = decoded(weights.down_EDF, x_TD.dtype)
    y_MD = expert_mlp.down(a_MF, down_EDF, grouping, bias_ED=weights.down_bias_ED, more=more)
    return gather_sum(y_MD, grouping.place_row_TK, scores_M), state


def recompute(
    x_TD: torch.Tensor,
    scores_M: torch.Tensor,
    weights: ExpertWeights,
    grouping: Grouping,
    activation: Activation = "swiglu",
) -> ExpertState:
    """What backward needs, without the output."""
    return _hidden(x_TD, scores_M, weights, grouping, activation)[1]


def _hidden(
    x_TD: torch.Tensor,
    scores_M: torch.Tensor,
    weights: ExpertWeights,
    grouping: Grouping,
    activation: Activation,
) -> tuple[torch.Tensor, ExpertState]:
    """(a [M, F], what backward needs)."""
    rows_TD, up = x_TD.contiguous(), weights.up_adapter
    u_MR = None if up is None else up.inner(rows_TD, grouping, grouping.row_token_M)
    h_MH, a_MF = expert_mlp.up(
        rows_TD,
        decoded(weights.up_EHD, rows_TD.dtype),
        grouping,
        grouping.row_token_M,
        activation=activation,
        bias_EH=weights.up_bias_EH,
        more=None if up is None or u_MR is None else up.forward(u_MR),
    )
    state = ExpertState(
        x_TD=x_TD, h_MH=h_MH, u_MR=u_MR, scores_M=scores_M, grouping=grouping, activation=activation
    )
    return a_MF, state


def dgrad(
    d_out_TD: torch.Tensor, state: ExpertState, weights: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor, HiddenGrads]:
    """(dx, gradient of the scores in row order, what wgrad needs)."""
    hidden, d_score_M = _d_hidden(d_out_TD, state, weights)
    return _d_x(hidden), d_score_M, hidden


def backward(
    d_out_TD: torch.Tensor,
    state: ExpertState,
    weights: ExpertWeights,
    grads: ExpertGrads,
    *,
    accumulate: bool,
    d_x: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(dx, d_scores_TK); gradients of the weights are added to `grads`, or written where not `accumulate`.

    Without `d_x` nobody wants the gradient of x: None.
    """
    place_TK = state.grouping.place_row_TK
    assert place_TK is not None
    hidden, d_score_M = _d_hidden(d_out_TD, state, weights)
    _down_wgrad(hidden, grads, accumulate)
    hidden = replace(hidden, scaled_MF=d_out_TD.new_empty(0))  # its memory serves what follows
    dx_TD = _d_x(hidden) if d_x else None
    _up_wgrad(hidden, grads, accumulate)
    return dx_TD, pick(d_score_M, place_TK)


def _d_hidden(
    d_out_TD: torch.Tensor, state: ExpertState, weights: ExpertWeights
) -> tuple[HiddenGrads, torch.Tensor]:
    """(what wgrad and the gradient of x need, gradient of the scores in row order)."""
    d_out_TD, grouping, token_M = d_out_TD.contiguous(), state.grouping, state.grouping.row_token_M
    up, down = weights.up_adapter, weights.down_adapter
    d_down_MR = None if down is None else down.d_inner(d_out_TD, grouping, token_M)
    d_h_MH, scaled_MF, d_score_M = expert_mlp.d_hidden(
        d_out_TD,
        state.scores_M,
        state.h_MH,
        decoded(weights.down_EDF, d_out_TD.dtype),
        grouping,
        token_M,
        activation=state.activation,
        bias_ED=weights.down_bias_ED,
        more=None if down is None or d_down_MR is None else down.backward(d_down_MR),
    )
    d_up_MR = None if up is None else up.d_inner(d_h_MH, grouping)
    hidden = HiddenGrads(
        state=state,
        weights=weights,
        d_out_TD=d_out_TD,
        d_h_MH=d_h_MH,
        scaled_MF=scaled_MF,
        d_inner=DInner(d_up_MR, d_down_MR),
    )
    return hidden, d_score_M


def _d_x(hidden: HiddenGrads) -> torch.Tensor:
    grouping, adapter, d_up_MR = hidden.state.grouping, hidden.weights.up_adapter, hidden.d_inner.up_MR
    assert grouping.place_row_TK is not None
    more = None if adapter is None or d_up_MR is None else adapter.backward(d_up_MR)
    up_EHD = decoded(hidden.weights.up_EHD, hidden.d_h_MH.dtype)
    d_rows_MD = expert_mlp.d_rows(hidden.d_h_MH, up_EHD, grouping, more=more)
    return gather_sum(d_rows_MD, grouping.place_row_TK)


def _down_wgrad(hidden: HiddenGrads, grads: ExpertGrads, accumulate: bool = True) -> None:
    state, d_out_TD, scaled_MF = hidden.state, hidden.d_out_TD, hidden.scaled_MF
    grouping, token_M, adapter = state.grouping, state.grouping.row_token_M, hidden.weights.down_adapter
    if (into := grads.down_EDF) is not None:
        offsets_E1 = grouping.offsets_E1
        grouped_wgrad(d_out_TD, scaled_MF, offsets_E1, into, dy_index_M=token_M, accumulate=accumulate)
    if (into := grads.down_bias_ED) is not None:
        weight_M = state.scores_M
        group_sum(d_out_TD, grouping, into, index_M=token_M, weight_M=weight_M, accumulate=accumulate)
    if (into := grads.down_a_ERF) is not None:
        d_down_MR = hidden.d_inner.down_MR
        assert d_down_MR is not None
        add_wgrad(d_down_MR, scaled_MF, grouping, into, accumulate=accumulate)
    if (into := grads.down_b_EDR) is not None and adapter is not None:
        # Of score x a instead of a: the score is in it, and forward had nothing to keep.
        inner_MR = adapter.inner(scaled_MF, grouping)
        add_wgrad(d_out_TD, inner_MR, grouping, into, dy_index_M=token_M, accumulate=accumulate)


def _up_wgrad(hidden: HiddenGrads, grads: ExpertGrads, accumulate: bool = True) -> None:
    state, d_h_MH = hidden.state, hidden.d_h_MH
    grouping, x_TD, token_M = state.grouping, state.x_TD.contiguous(), state.grouping.row_token_M
    if (into := grads.up_EHD) is not None:
        grouped_wgrad(d_h_MH, x_TD, grouping.offsets_E1, into, x_index_M=token_M, accumulate=accumulate)
    if (into := grads.up_bias_EH) is not None:
        group_sum(d_h_MH, grouping, into, accumulate=accumulate)
    if (into := grads.up_a_ERD) is not None:
        d_up_MR = hidden.d_inner.up_MR
        assert d_up_MR is not None
        add_wgrad(d_up_MR, x_TD, grouping, into, x_index_M=token_M, accumulate=accumulate)
    if (into := grads.up_b_EHR) is not None:
        assert state.u_MR is not None
        add_wgrad(d_h_MH, state.u_MR, grouping, into, accumulate=accumulate)
