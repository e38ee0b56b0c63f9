"""Small parts with initial weights that depend on (seed, layer, name) alone, never on the layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.ops.random import fill_normal, key_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every part of one layer is made with."""

    layer: int
    num_layers: int
    seed: int
    init_std: float
    device: torch.device
    dtype: torch.dtype

    @property
    def residual_std(self) -> float:
        """Of weights that write to the residual stream: its variance must not grow with depth."""
        return self.init_std / math.sqrt(2 * max(self.num_layers, 1))


class Linear(nn.Module):
    """y = x W^T, no bias."""

    def __init__(
        self, d_in: int, d_out: int, settings: Settings, name: str, *, residual: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=settings.device, dtype=settings.dtype))
        std = settings.residual_std if residual else settings.init_std
        fill_normal(self.weight.data, key_of(settings.seed, settings.layer, name), std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, settings: Settings, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=settings.device, dtype=settings.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class DenseMLP(nn.Module):
    """SwiGLU without experts, for the first layers of models that have them."""

    def __init__(self, d_model: int, d_ff: int, settings: Settings) -> None:
        super().__init__()
        self.up = Linear(d_model, 2 * d_ff, settings, "up")
        self.down = Linear(d_ff, d_model, settings, "down", residual=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
