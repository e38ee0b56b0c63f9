"""Any experts over rows that each visit several of them: a copy of the row for each pair.

    forward    x_m = row of pair m          y = experts(x)       partial_r = sum of score * y over its pairs
    backward   dy_m = score_m * d_partial   d_score = d_partial . y        d_row = sum of dx over its pairs

Where scores multiply what goes in (Llama 4), not what comes out:

    forward    y = experts(score_m x_m)     partial_r = sum of y over its pairs
    backward   d_in = d_partial through the experts        d_score = d_in . x       dx_m = score_m d_in

The kernels of `moe/experts/fused` do the same without the copies, where they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moeclipse.moe.exchange.structure import Structure
from moeclipse.moe.experts.protocols import ExpertSet
from moeclipse.ops.combine import sum_rows
from moeclipse.tensor.weight_grad import Grads


@dataclass(frozen=True, kw_only=True)
class PairsSaved:
    experts: Any
    """What the experts keep."""
    scored_MW: torch.Tensor
    """What the scores multiplied."""
    index_M: torch.Tensor
    score_M: torch.Tensor
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class PairwiseExperts:
    """`like`: an empty tensor for each of a token's, as the experts want it; others travel as bytes."""

    experts: ExpertSet
    structure: Structure
    like: Sequence[torch.Tensor]
    score_input: bool = False
    """Scores multiply the first of a token's tensors on its way in."""

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return self.experts.weights

    @property
    def out_width(self) -> int:
        return self.experts.out_width

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
        y_MO, saved = self.experts.forward(self.structure.put_together(gathered), counts, *given)
        num_rows = len(rows[0])
        partial_RO = sum_rows(y_MO, index_M, num_rows, *(() if self.score_input else (score_M,)))
        if not self.score_input:
            scored_MW = y_MO
        return partial_RO, PairsSaved(
            experts=saved, scored_MW=scored_MW, index_M=index_M, score_M=score_M, num_rows=num_rows
        )

    def dgrad(
        self, d_partial_RO: torch.Tensor, saved: PairsSaved
    ) -> tuple[list[torch.Tensor | None], torch.Tensor, Any]:
        score_M, wide = saved.score_M, saved.score_M.dtype
        d_pair_MO = d_partial_RO[saved.index_M]
        if self.score_input:
            d_x, pending = self.experts.dgrad(d_pair_MO, saved.experts)
            d_in, *others = self.structure.flatten(d_x)
            d_score_M = (d_in.to(wide) * saved.scored_MW.to(wide)).sum(-1)
            d_inputs = [(d_in * score_M[:, None]).to(d_in.dtype), *others]
        else:
            d_score_M = (d_pair_MO.to(wide) * saved.scored_MW.to(wide)).sum(-1)
            d_y_MO = (d_pair_MO * score_M[:, None]).to(saved.scored_MW.dtype)
            d_x, pending = self.experts.dgrad(d_y_MO, saved.experts)
            d_inputs = list(self.structure.flatten(d_x))
        d_rows = [
            sum_rows(grad, saved.index_M, saved.num_rows) if grad.is_floating_point() else None
            for grad in d_inputs
        ]
        return d_rows, d_score_M, pending

    def wgrad(self, pending: Sequence[Any], begun: Grads = (), wanted: Sequence[bool] | None = None) -> Grads:
        return self.experts.wgrad(pending, begun, wanted)
