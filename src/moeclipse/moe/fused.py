"""Experts on rows as they arrived: gathered while loading, summed while storing.

    forward    h, a = up(rows[index])    y = down(a)    partial_r = sum of score * y over the pairs of row r
    backward   dh, score a, d_score = d_hidden(d_rows[index])    d_x_r = sum of d_rows(dh) over its pairs

What `moe/experts` does with a copy of each row for each pair, `ops/expert_mlp` does without: only the rows
and h are kept for backward. Taken on CUDA for bf16 and fp16; on CPU the same calls run their references, so
that tests of this file need no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeclipse.moe.experts import Experts
from moeclipse.moe.gates import rank_among_equals
from moeclipse.ops import expert_mlp
from moeclipse.ops.bias import group_sum
from moeclipse.ops.combine import gather_sum
from moeclipse.ops.routing_metadata import Grouping, group_counts
from moeclipse.ops.tuning import device_fits
from moeclipse.ops.wgrad import grouped_wgrad


@dataclass(frozen=True, kw_only=True)
class FusedSaved:
    rows_RD: torch.Tensor
    h_MH: torch.Tensor
    score_M: torch.Tensor
    index_M: torch.Tensor
    places_RK: torch.Tensor
    grouping: Grouping


@dataclass(frozen=True, kw_only=True)
class FusedPending:
    """Weight gradients to come: products of rows that are gathered while loading."""

    saved: FusedSaved
    d_rows_RD: torch.Tensor
    d_h_MH: torch.Tensor
    scaled_MF: torch.Tensor

    def add_to(self, up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor) -> None:
        saved, offsets = self.saved, self.saved.grouping.offsets_E1
        grouped_wgrad(self.d_rows_RD, self.scaled_MF, offsets, down, dy_index_M=saved.index_M)
        grouped_wgrad(self.d_h_MH, saved.rows_RD, offsets, up, x_index_M=saved.index_M)
        if biases:
            up_bias, down_bias = biases
            group_sum(self.d_h_MH, saved.grouping, up_bias)
            rows, index_M, score_M = self.d_rows_RD, saved.index_M, saved.score_M
            group_sum(rows, saved.grouping, down_bias, index_M=index_M, weight_M=score_M)


def fits(experts: object, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these experts and rows."""
    if not isinstance(experts, Experts) or len(inputs) != 1 or not experts.ids:
        return False
    x, widths = inputs[0], (experts.down.shape[2], experts.up.shape[2])
    takes = device_fits(x.device) and x.dtype in expert_mlp.KERNEL_DTYPES and experts.up.dtype == x.dtype
    return takes and all(width % 8 == 0 for width in widths)


class FusedExperts:
    """Forward and dgrad of one unit; wgrad goes through `Experts.wgrad` like any other."""

    def __init__(self, experts: Experts, top_k: int) -> None:
        self.experts = experts
        self.most = min(top_k, len(experts.ids))
        """Pairs that a row can have here."""

    def forward(
        self, rows_RD: torch.Tensor, index_M: torch.Tensor, counts: Sequence[int], score_M: torch.Tensor
    ) -> tuple[torch.Tensor, FusedSaved]:
        """The partial sums of the rows; pairs are grouped by expert, `index_M` names the row of each."""
        device = rows_RD.device
        grouping = group_counts(torch.tensor(list(counts), device=device), len(index_M))
        places_RK = torch.full((len(rows_RD), self.most), -1, dtype=torch.int32, device=device)
        pair_M = torch.arange(len(index_M), dtype=torch.int32, device=device)
        places_RK[index_M, rank_among_equals(index_M)] = pair_M
        index_M = index_M.to(torch.int32)
        experts = self.experts
        up_bias, down_bias = (experts.up_bias, experts.down_bias) if experts.biased else (None, None)
        h_MH, a_MF = expert_mlp.up(
            rows_RD, experts.up, grouping, index_M, activation=experts.activation, bias_EH=up_bias
        )
        y_MD = expert_mlp.down(a_MF, experts.down, grouping, bias_ED=down_bias)
        saved = FusedSaved(
            rows_RD=rows_RD,
            h_MH=h_MH,
            score_M=score_M,
            index_M=index_M,
            places_RK=places_RK,
            grouping=grouping,
        )
        return gather_sum(y_MD, places_RK, score_M), saved

    def dgrad(
        self, d_rows_RD: torch.Tensor, saved: FusedSaved
    ) -> tuple[torch.Tensor, torch.Tensor, FusedPending]:
        """(gradient of the rows, of the scores, weight gradients to come)."""
        d_rows_RD = d_rows_RD.contiguous()
        experts, grouping = self.experts, saved.grouping
        d_h_MH, scaled_MF, d_score_M = expert_mlp.d_hidden(
            d_rows_RD,
            saved.score_M,
            saved.h_MH,
            experts.down,
            grouping,
            saved.index_M,
            activation=experts.activation,
            bias_ED=experts.down_bias if experts.biased else None,
        )
        dx_RD = gather_sum(expert_mlp.d_rows(d_h_MH, experts.up, grouping), saved.places_RK)
        pending = FusedPending(saved=saved, d_rows_RD=d_rows_RD, d_h_MH=d_h_MH, scaled_MF=scaled_MF)
        return dx_RD, d_score_M, pending
