"""Experts on rows as they arrived: gathered while loading, summed while storing.

What `moe/experts/two_projections` does with a copy of each row for each pair, the passes of
`ops/expert_passes` do without: only the rows and h are kept for backward. Taken on CUDA for bf16 and fp16; on
CPU the same calls run their references, so that tests of this file need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import nn

from moeclipse.moe.experts.two_projections import Experts
from moeclipse.ops import expert_passes
from moeclipse.ops.activation import Activation
from moeclipse.ops.expert_mlp import KERNEL_DTYPES
from moeclipse.ops.expert_passes import (
    ADAPTERS,
    BIASES,
    NAMES,
    WEIGHTS,
    ExpertState,
    ExpertWeights,
    HiddenGrads,
)
from moeclipse.ops.frozen import in_type
from moeclipse.ops.grouped_experts import grouped_experts
from moeclipse.ops.grouping import Grouping, group_arrived
from moeclipse.ops.tuning import device_fits
from moeclipse.tensor.weight_grad import Grads, are_first


def fits(experts: Experts, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these experts and rows; the layer has checked that their types go together."""
    if len(inputs) != 1 or not experts.ids:
        return False
    x, widths = inputs[0], (experts.down.shape[2], experts.up.shape[2])
    takes = device_fits(x.device) and x.dtype in KERNEL_DTYPES
    return takes and all(width % 8 == 0 for width in widths)


def visit_all(
    experts: Experts,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    *,
    sums: bool,
    output: bool = True,
) -> torch.Tensor:
    """All experts of a layer, which are here: one node for autograd, and no device-to-host sync.

    `sums`: gradients go where the weights' accumulators are, if all that want some have one. Without `output`
    nobody reads it.
    """
    given = (in_type(weight, x_TD.dtype) for weight in experts.operands)
    named: dict[str, Any] = dict(zip(experts.operand_names, given, strict=True))
    weights = [named.get(name) for name in (*WEIGHTS, *BIASES)]
    nowhere: Sums = {}  # a literal: torch's compiler cannot look into `Sums()`
    return grouped_experts(
        x_TD,
        scores_TK,
        ids_TK,
        *weights,  # type: ignore[arg-type]
        activation=experts.activation,
        adapters=[named.get(name) for name in ADAPTERS],
        scale=experts.scale,
        output=output,
        **(sums_of(experts) if sums else nowhere),
    )


class Sums(TypedDict, total=False):
    into: list[torch.Tensor | None]
    stores: Callable[[], bool]


def sums_of(experts: Experts) -> Sums:
    """Where `ops/grouped_experts` leaves the gradients of the weights; those that are frozen have none."""
    trained = {n: w for n, w in zip(experts.names, experts.weights, strict=True) if w.requires_grad}
    into = {name: getattr(weight, "main_grad", None) for name, weight in trained.items()}
    if not trained or any(place is None for place in into.values()):
        return {}
    return {"into": [into.get(name) for name in NAMES], "stores": partial(are_first, list(trained.values()))}


@dataclass(frozen=True, kw_only=True)
class FusedSaved:
    state: ExpertState
    weights: ExpertWeights
    """Those that forward computed with."""


class FusedExperts:
    """`PairExperts` of one unit; wgrad goes through `Experts.wgrad` like any other."""

    def __init__(self, experts: Experts, top_k: int, lent: Sequence[torch.Tensor] = ()) -> None:
        """`lent`: the weights of other ranks' experts, to compute with instead."""
        self.experts, self.top_k, self.lent = experts, top_k, lent
        self.most = min(top_k, len(lent[0]) if lent else len(experts.ids))
        """Pairs that a row can have here."""

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return self.experts.weights

    def wgrad(
        self, pending: Sequence[HiddenGrads], begun: Grads = (), wanted: Sequence[bool] | None = None
    ) -> Grads:
        return self.experts.wgrad(pending, begun, wanted)

    def forward(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
        grouping: Grouping | None = None,
    ) -> tuple[torch.Tensor, FusedSaved]:
        """`grouping`: of these pairs, where it is known."""
        given = self._operands(rows, index_M, counts, score_M, grouping)
        sums, state = expert_passes.forward(*given)
        return sums, FusedSaved(state=state, weights=given[2])

    def recompute(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
        grouping: Grouping | None = None,
    ) -> FusedSaved:
        given = self._operands(rows, index_M, counts, score_M, grouping)
        return FusedSaved(state=expert_passes.recompute(*given), weights=given[2])

    def _operands(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
        grouping: Grouping | None,
    ) -> tuple[torch.Tensor, torch.Tensor, ExpertWeights, Grouping, Activation]:
        (rows_RD,) = rows
        grouping = grouping or group_arrived(index_M, counts, len(rows_RD), self.most)
        numbers = [in_type(weight, rows_RD.dtype) for weight in self.lent or self.experts.operands]
        weights = ExpertWeights.of(numbers, self.experts.operand_names, self.experts.scale)
        return rows_RD, score_M, weights, grouping, self.experts.activation

    def dgrad(
        self, d_partial_RO: torch.Tensor, saved: FusedSaved
    ) -> tuple[list[torch.Tensor | None], torch.Tensor, HiddenGrads]:
        d_rows_RD, d_score_M, pending = expert_passes.dgrad(d_partial_RO, saved.state, saved.weights)
        return [d_rows_RD], d_score_M, pending
