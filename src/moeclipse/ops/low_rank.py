"""An adapter of one projection of experts: the weight is W + s B A, of low rank, and the sum is never made.

    forward   u = s x A^T         the projection adds u B^T to its own sum
    dgrad     d_u = s dy B        the gradient of x adds d_u A
    wgrad     dB += dy^T u        dA += d_u^T x

A is [E, R, K], B [E, N, R]. Everything is one product for all experts; the narrow ones read their rows once
and write R columns.

Hazard: kernels take widths that are multiples of 8. On CUDA another rank is filled up with zeros: u and d_u
are wider then than A and B, and `add_wgrad` cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from moeclipse.ops.expert_kernels import More
from moeclipse.ops.expert_mlp import narrow
from moeclipse.ops.grouped_gemm import grouped_wgrad
from moeclipse.ops.grouping import Grouping

MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class LowRank:
    a_ERK: torch.Tensor
    b_ENR: torch.Tensor
    scale: float

    @classmethod
    def of(cls, a_ERK: torch.Tensor | None, b_ENR: torch.Tensor | None, scale: float) -> LowRank | None:
        """None: this projection has no adapter."""
        if a_ERK is None or b_ENR is None:
            return None
        if a_ERK.is_cuda and (missing := -a_ERK.shape[1] % MULTIPLE):
            a_ERK, b_ENR = pad(a_ERK, (0, 0, 0, missing)), pad(b_ENR, (0, missing))
        return cls(a_ERK=a_ERK.contiguous(), b_ENR=b_ENR.contiguous(), scale=scale)

    def inner(
        self, rows: torch.Tensor, grouping: Grouping, index_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """u [M, R]."""
        return narrow(rows, self.a_ERK, grouping, index_M, scale=self.scale, transposed=True)

    def d_inner(
        self, dy: torch.Tensor, grouping: Grouping, index_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """d_u [M, R]."""
        return narrow(dy, self.b_ENR, grouping, index_M, scale=self.scale, transposed=False)

    def forward(self, u_MR: torch.Tensor) -> More:
        """What the projection adds."""
        return More(u_MR, self.b_ENR)

    def backward(self, d_u_MR: torch.Tensor) -> More:
        """What the gradient of the projection's input adds."""
        return More(d_u_MR, self.a_ERK)


def add_wgrad(
    dy: torch.Tensor,
    x: torch.Tensor,
    grouping: Grouping,
    into_END: torch.Tensor,
    *,
    dy_index_M: torch.Tensor | None = None,
    x_index_M: torch.Tensor | None = None,
    accumulate: bool = True,
) -> None:
    """into_e += dy_e^T x_e; columns of dy and x that `into` lacks are zeros, and left out."""
    _, N, D = into_END.shape
    indices = {"dy_index_M": dy_index_M, "x_index_M": x_index_M}
    if (dy.shape[1], x.shape[1]) == (N, D):
        grouped_wgrad(dy, x, grouping.offsets_E1, into_END, **indices, accumulate=accumulate)
        return
    whole = into_END.new_empty(len(into_END), dy.shape[1], x.shape[1])
    grouped_wgrad(dy, x, grouping.offsets_E1, whole, **indices, accumulate=False)
    if accumulate:
        into_END.add_(whole[:, :N, :D])
    else:
        into_END.copy_(whole[:, :N, :D])
