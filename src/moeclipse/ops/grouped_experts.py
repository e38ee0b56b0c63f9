"""All experts of a MoE layer on one rank: the gate's choice in, weighted sum of experts out.

Differentiable in x, the scores, both weights, both biases and the adapters of both weights; what is computed
is in `ops/expert_passes`.
`into` names fp32 sums that the weight gradients are added to, or stored in where `stores` says so when
backward runs; without them autograd gets fresh gradients in the weights' type. `grouped_experts_reference`
is the same function in plain torch operations. Inside `torch.compile` the call is one registered operator
(`ops/expert_operators`).

With `output=False`, where a layer is recomputed for its backward, zeros come out and the second product is
left out.

Hazard: inside `torch.compile` gradients cannot be added to `into`: a compiled backward must not change
its inputs. The call is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moeclipse.ops import expert_operators, expert_passes
from moeclipse.ops.activation import Activation, activate
from moeclipse.ops.expert_passes import ADAPTERS, ExpertGrads, ExpertState, ExpertWeights, in_row_order
from moeclipse.ops.first_order import first_order
from moeclipse.ops.frozen import Frozen, Weight
from moeclipse.ops.grouping import Grouping, group_rows
from moeclipse.ops.precision import WIDE

Into = Sequence[torch.Tensor | None] | None
Adapters = Sequence[torch.Tensor | None]
"""A [E, R, D] and B [E, H, R] of the up-projection, A [E, R, F] and B [E, D, R] of the down-projection."""
NO_ADAPTERS = (None,) * len(ADAPTERS)


def grouped_experts_reference(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    up_EHD: torch.Tensor,
    down_EDF: torch.Tensor,
    up_bias_EH: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    adapters: Adapters = NO_ADAPTERS,
    scale: float = 1.0,
) -> torch.Tensor:
    """One expert after the other, adapters merged; autograd does the rest."""
    out = torch.zeros_like(x_TD, dtype=WIDE[x_TD.dtype])
    up_a, up_b, down_a, down_b = adapters
    for expert in range(len(up_EHD)):
        token, choice = (expert_ids_TK == expert).nonzero(as_tuple=True)
        up_HD, down_DF = up_EHD[expert], down_EDF[expert]
        up_HD = up_HD if up_a is None or up_b is None else up_HD + scale * up_b[expert] @ up_a[expert]
        if down_a is not None and down_b is not None:
            down_DF = down_DF + scale * down_b[expert] @ down_a[expert]
        h = x_TD[token] @ up_HD.t()
        h = h if up_bias_EH is None else h + up_bias_EH[expert]
        y = activate(h, activation) @ down_DF.t()
        y = y if down_bias_ED is None else y + down_bias_ED[expert]
        out = out.index_add(0, token, y.to(out.dtype) * scores_TK[token, choice].to(out.dtype)[:, None])
    return out.to(x_TD.dtype)


def grouped_experts(
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    up_EHD: Weight,
    down_EDF: Weight,
    up_bias_EH: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    adapters: Adapters = NO_ADAPTERS,
    scale: float = 1.0,
    into: Into = None,
    stores: Callable[[], bool] | None = None,
    output: bool = True,
) -> torch.Tensor:
    """out [T, D]. `into`: sums for the gradients of (up, down), then of biases, then of adapters.

    Without `output` nobody reads it.
    """
    weights = (up_EHD, down_EDF, up_bias_EH, down_bias_ED, *adapters)
    if torch.compiler.is_compiling():
        if into is not None:
            raise ValueError("grouped_experts cannot add gradients to `into` inside torch.compile; omit it")
        if isinstance(up_EHD, Frozen):
            raise ValueError(
                "grouped_experts cannot decode weights inside torch.compile; give them as they are"
            )
        given: Any = (x_TD, scores_TK, expert_ids_TK, *weights)
        return expert_operators.grouped_experts(*given, activation, scale)[0]
    grouping = group_rows(expert_ids_TK, up_EHD.shape[0])
    how = (activation, scale, into, stores, output)
    return _GroupedExperts.apply(x_TD, scores_TK, grouping, *how, *weights)


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        grouping: Grouping,
        activation: Activation,
        scale: float,
        into: Into,
        stores: Callable[[], bool] | None,
        output: bool,
        *weights: Weight | None,
    ) -> torch.Tensor:
        given, scores_M = ExpertWeights.of(weights, scale=scale), in_row_order(scores_TK, grouping)
        if output:
            out_TD, state = expert_passes.forward(x_TD, scores_M, given, grouping, activation)
        else:
            state = expert_passes.recompute(x_TD, scores_M, given, grouping, activation)
            out_TD = torch.zeros_like(x_TD)
        ctx.save_for_backward(x_TD, state.h_MH, state.u_MR, scores_M, *given.tensors())
        ctx.frozen = [weight if isinstance(weight, Frozen) else None for weight in weights]
        ctx.grouping, ctx.activation, ctx.scale = grouping, activation, scale
        ctx.into, ctx.stores, ctx.scores_dtype = into, stores, scores_TK.dtype
        return out_TD

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out_TD: torch.Tensor) -> tuple[Any, ...]:
        x_TD, h_MH, u_MR, scores_M, *tensors = ctx.saved_tensors
        state = ExpertState(
            x_TD=x_TD,
            h_MH=h_MH,
            u_MR=u_MR,
            scores_M=scores_M,
            grouping=ctx.grouping,
            activation=ctx.activation,
        )
        whole = [frozen or tensor for frozen, tensor in zip(ctx.frozen, tensors, strict=True)]
        weights, fresh = ExpertWeights.of(whole, scale=ctx.scale), ctx.into is None
        wanted = ctx.needs_input_grad[-len(tensors) :]
        grads = weights.empty_grads(wanted) if fresh else ExpertGrads.of(ctx.into)
        add = not fresh and (ctx.stores is None or not ctx.stores())
        how = {"accumulate": add, "d_x": ctx.needs_input_grad[0]}
        dx_TD, d_scores_TK = expert_passes.backward(d_out_TD, state, weights, grads, **how)
        found = grads.tensors() if fresh else (None,) * len(tensors)
        return dx_TD, d_scores_TK.to(ctx.scores_dtype), *(None,) * 6, *found
