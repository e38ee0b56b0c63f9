"""All experts of a layer are on this rank: pairs are sorted by expert, computed and summed; nothing travels.

    forward    order = pairs (token, choice) by expert       y_t = sum of score * expert(x_t) over its pairs
    backward   d_score, d_x and weight gradients in the same order

The kernels' form of it is `fused.visit_all`, where they fit. The bits are those of an exchange among one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moeclipse.moe.exchange.saved_tensors import put_together, take_apart
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.private_torch import keeps_graph
from moeclipse.ops.first_order import first_order


def visit_local(
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    experts: PairwiseExperts,
    inputs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The output of each token; an expert of -1 is none."""
    y_TO: torch.Tensor = LocalExperts.apply(scores_TK, expert_ids_TK, experts, *inputs, *experts.weights)
    return y_TO


class LocalExperts(torch.autograd.Function):
    """Called with (scores, ids, experts, inputs..., weights...): gradients as in `dispatch_combine`."""

    @staticmethod
    def forward(
        ctx: Any,
        scores_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        experts: PairwiseExperts,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        inputs, num_experts = tensors[: len(experts.like)], len(experts.experts.ids)
        expert_n = expert_ids_TK.flatten()
        expert_n = torch.where(expert_n < 0, num_experts, expert_n)  # those of nobody come last
        counts = expert_n.bincount(minlength=num_experts + 1).tolist()[:num_experts]
        order_M = expert_n.argsort(stable=True)[: sum(counts)]
        token_M = order_M.div(expert_ids_TK.shape[1], rounding_mode="floor")
        y_TO, saved = experts.forward(inputs, token_M, counts, scores_TK.flatten()[order_M])
        ctx.state, kept = take_apart((saved, order_M), (PairwiseExperts,))
        ctx.save_for_backward(*kept)
        ctx.experts, ctx.num_inputs = experts, len(inputs)
        ctx.scores = (scores_TK.shape, scores_TK.dtype)
        return y_TO

    @staticmethod
    @first_order
    def backward(ctx: Any, d_y_TO: torch.Tensor) -> tuple[Any, ...]:
        saved, order_M = put_together(ctx.state, ctx.saved_tensors, (PairwiseExperts,))
        experts, (shape, dtype) = ctx.experts, ctx.scores
        d_inputs, d_score_M, pending = experts.dgrad(d_y_TO, saved)
        d_scores_TK = d_score_M.new_zeros(shape, dtype=dtype)
        d_scores_TK.view(-1)[order_M] = d_score_M.to(dtype)
        if not keeps_graph():
            ctx.state = None
        d_weights = experts.wgrad([pending], wanted=ctx.needs_input_grad[3 + ctx.num_inputs :])
        return d_scores_TK, None, None, *d_inputs, *d_weights
