"""Experts on rows as they arrived: gathered while loading, summed while storing.

What `moe/experts` does with a copy of each row for each pair, the passes of `ops/expert_passes` do without:
only the rows and h are kept for backward. Taken on CUDA for bf16 and fp16; on CPU the same calls run their
references, so that tests of this file need no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.moe.experts import Experts
from moeclipse.ops import expert_passes
from moeclipse.ops.expert_mlp import KERNEL_DTYPES
from moeclipse.ops.expert_passes import ExpertState, ExpertWeights, HiddenGrads
from moeclipse.ops.grouping import group_arrived
from moeclipse.ops.tuning import device_fits


def fits(experts: object, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these experts and rows."""
    if not isinstance(experts, Experts) or len(inputs) != 1 or not experts.ids:
        return False
    x, widths = inputs[0], (experts.down.shape[2], experts.up.shape[2])
    takes = device_fits(x.device) and x.dtype in KERNEL_DTYPES and experts.up.dtype == x.dtype
    return takes and all(width % 8 == 0 for width in widths)


class FusedExperts:
    """Forward and dgrad of one unit; wgrad goes through `Experts.wgrad` like any other."""

    def __init__(self, experts: Experts, top_k: int) -> None:
        self.experts = experts
        self.most = min(top_k, len(experts.ids))
        """Pairs that a row can have here."""

    def forward(
        self, rows_RD: torch.Tensor, index_M: torch.Tensor, counts: Sequence[int], score_M: torch.Tensor
    ) -> tuple[torch.Tensor, ExpertState]:
        """The partial sums of the rows; pairs are grouped by expert, `index_M` names the row of each."""
        grouping = group_arrived(index_M, counts, len(rows_RD), self.most)
        weights = ExpertWeights.of(self.experts.weights)
        return expert_passes.forward(rows_RD, score_M, weights, grouping, self.experts.activation)

    def dgrad(
        self, d_rows_RD: torch.Tensor, saved: ExpertState
    ) -> tuple[torch.Tensor, torch.Tensor, HiddenGrads]:
        """(gradient of the rows, of the scores, weight gradients to come)."""
        return expert_passes.dgrad(d_rows_RD, saved, ExpertWeights.of(self.experts.weights))
