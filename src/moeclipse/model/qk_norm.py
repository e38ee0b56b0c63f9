"""Norms of queries and keys, behind their projections.

    head     each head by itself, with one weight vector for all heads (Qwen3, GLM-4)
    whole    all heads of a token together, with a weight for each component (OLMoE)
    turned   as head, but behind rotary position (Hunyuan-V1)
    unit     as turned, without weights (Llama 4)

Under tensor parallelism a rank has some heads of all tokens. The weights of `head` are whole on every rank,
and each rank's heads give a share of their gradient. Those of `whole` are cut like the heads, and the sum of
squares goes over all ranks: one number for a token.
"""

from __future__ import annotations

import torch
from torch import nn

from moeclipse.model.blocks import RMSNorm, Settings
from moeclipse.ops.norm import rms_norm
from moeclipse.ops.precision import WIDE
from moeclipse.tensor.cut import Cut, mark
from moeclipse.tensor.parallel import move
from moeclipse.tensor.weight_grad import place_of


class HeadNorm(RMSNorm):
    """Over the last dimension, which is one head."""

    def __init__(self, width: int, settings: Settings, eps: float, shift: float = 0.0) -> None:
        super().__init__(width, settings, eps, shift)
        mark(self.weight, "sum")


class WholeNorm(nn.Module):
    """Over the heads of all tp ranks; `unit` neighbours (a head, or a group of them) stay on one rank."""

    def __init__(
        self, width: int, unit: int, settings: Settings, eps: float, name: str, shift: float = 0.0
    ) -> None:
        super().__init__()
        self.width, self.eps, self.tp, self.shift = width, eps, settings.tp, shift
        self.label = f"squares of {name}, layer {settings.layer}"
        cut = Cut.of(
            (width,), 0, index=settings.tp.index, parts=settings.tp.size, unit=unit, what=f"width of {name}"
        )
        first = torch.full(cut.local_shape, 1 - shift, device=settings.device, dtype=settings.dtype)
        self.weight = mark(nn.Parameter(first), cut)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return rms_norm(x_TD, self.weight, self.eps, place_of(self.weight), self.shift)
        wide_TD = x_TD.to(WIDE[x_TD.dtype])
        squares_T1 = wide_TD.square().sum(-1, keepdim=True)
        # Every rank's components use the sum, and every rank's components are in it.
        squares_T1 = move(squares_T1, self.tp, "sum", "sum", self.label)
        scale_T1 = torch.rsqrt(squares_T1 / self.width + self.eps)
        if self.shift:
            return (wide_TD * scale_T1 * (self.weight.to(wide_TD.dtype) + self.shift)).to(x_TD.dtype)
        return (wide_TD * scale_T1).to(x_TD.dtype) * self.weight


class UnitNorm(nn.Module):
    """Over the last dimension, without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(WIDE[x.dtype])
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
