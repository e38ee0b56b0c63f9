"""Any experts over rows that each visit several of them: a copy of the row for each pair.

    forward    x_m = row of pair m          y = experts(x)       partial_r = sum of score * y over its pairs
    backward   dy_m = score_m * d_partial   d_score = d_partial . y        d_row = sum of dx over its pairs

Where scores multiply what goes in (Llama 4), not what comes out:

    forward    y = experts(score_m x_m)     partial_r = sum of y over its pairs
    backward   d_in = d_partial through the experts        d_score = d_in . x       dx_m = score_m d_in

Where all experts of a layer are on this rank, pairs are sorted by expert, computed and summed, and nothing
travels (`visit_local`): one node of autograd, with the bits of an exchange among one.

The kernels of `moe/experts/fused` do the same without the copies, where they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moeclipse.moe.exchange.saved_tensors import Context, put_together, take_apart
from moeclipse.moe.experts.protocols import ExpertSet
from moeclipse.moe.private_torch import keeps_graph
from moeclipse.moe.tokens import Structure
from moeclipse.ops.combine import sum_rows
from moeclipse.ops.first_order import first_order
from moeclipse.tensor.weight_grad import Grads


@dataclass(frozen=True, kw_only=True)
class PairsSaved:
    experts: object
    """What the experts keep."""
    scored_MW: torch.Tensor
    """What the scores multiplied."""
    index_M: torch.Tensor
    score_M: torch.Tensor
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class PairwiseExperts:
    """`like`: an empty tensor for each of a token's, as the experts want it; others travel as bytes."""

    experts: ExpertSet[Any]
    structure: Structure
    like: Sequence[torch.Tensor]
    score_input: bool = False
    """Scores multiply the first of a token's tensors on its way in."""

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return self.experts.weights

    def forward(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
        shadows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, PairsSaved]:
        gathered = [tensor[index_M].to(like.dtype) for tensor, like in zip(rows, self.like, strict=True)]
        given = () if shadows is None else (shadows,)
        scored_MW = gathered[0]
        if self.score_input:
            gathered[0] = (scored_MW * score_M[:, None]).to(scored_MW.dtype)
        x = gathered[0] if self.structure.alone else self.structure.put_together(gathered)
        y_MO, saved = self.experts.forward(x, counts, *given)
        num_rows = len(rows[0])
        partial_RO = sum_rows(y_MO, index_M, num_rows, *(() if self.score_input else (score_M,)))
        if not self.score_input:
            scored_MW = y_MO
        return partial_RO, PairsSaved(
            experts=saved, scored_MW=scored_MW, index_M=index_M, score_M=score_M, num_rows=num_rows
        )

    def recompute(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
    ) -> PairsSaved:
        """The whole of forward: scores have their gradients from y."""
        return self.forward(rows, index_M, counts, score_M)[1]

    def dgrad(
        self, d_partial_RO: torch.Tensor, saved: PairsSaved
    ) -> tuple[list[torch.Tensor | None], torch.Tensor, object]:
        score_M, wide = saved.score_M, saved.score_M.dtype
        d_pair_MO = d_partial_RO[saved.index_M]
        if self.score_input:
            d_x, pending = self.experts.dgrad(d_pair_MO, saved.experts)
            d_in, *others = (d_x,) if self.structure.alone else self.structure.flatten(d_x)
            d_score_M = (d_in.to(wide) * saved.scored_MW.to(wide)).sum(-1)
            d_inputs = [(d_in * score_M[:, None]).to(d_in.dtype), *others]
        else:
            d_score_M = (d_pair_MO.to(wide) * saved.scored_MW.to(wide)).sum(-1)
            d_y_MO = (d_pair_MO * score_M[:, None]).to(saved.scored_MW.dtype)
            d_x, pending = self.experts.dgrad(d_y_MO, saved.experts)
            d_inputs = [d_x] if self.structure.alone else list(self.structure.flatten(d_x))
        d_rows = [
            sum_rows(grad, saved.index_M, saved.num_rows) if grad.is_floating_point() else None
            for grad in d_inputs
        ]
        return d_rows, d_score_M, pending

    def wgrad(self, pending: Sequence[Any], begun: Grads = (), wanted: Sequence[bool] | None = None) -> Grads:
        return self.experts.wgrad(pending, begun, wanted)


def visit_local(
    scores_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    experts: PairwiseExperts,
    inputs: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The output of each token; an expert of -1 is none."""
    y_TO: torch.Tensor = LocalExperts.apply(scores_TK, expert_ids_TK, experts, *inputs, *experts.weights)
    return y_TO


class LocalContext(Context):
    experts: PairwiseExperts
    num_inputs: int
    scores: tuple[torch.Size, torch.dtype]
    state: tuple[PairsSaved, torch.Tensor] | None


class LocalExperts(torch.autograd.Function):
    """Called with (scores, ids, experts, inputs..., weights...): gradients as in `dispatch_combine`."""

    @staticmethod
    def forward(
        ctx: LocalContext,
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
    def backward(ctx: LocalContext, d_y_TO: torch.Tensor) -> tuple[object, ...]:
        saved, order_M = put_together(ctx.state, ctx.saved_tensors, (PairwiseExperts,))
        experts, (shape, dtype) = ctx.experts, ctx.scores
        d_inputs, d_score_M, pending = experts.dgrad(d_y_TO, saved)
        d_scores_TK = d_score_M.new_zeros(shape, dtype=dtype)
        d_scores_TK.view(-1)[order_M] = d_score_M.to(dtype)
        if not keeps_graph():
            ctx.state = None
        d_weights = experts.wgrad([pending], wanted=ctx.needs_input_grad[3 + ctx.num_inputs :])
        return d_scores_TK, None, None, *d_inputs, *d_weights
