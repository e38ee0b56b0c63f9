"""Low-rank adapters beside frozen linears: y = W x + (alpha / rank) B (A x), A and B trained, W not.

    column (q, k, v)   A whole on every tp rank, B cut as W: what is narrow travels
    row (o)            A cut as W, summed over tp; B whole
    whole              A and B whole, as W: the narrow projections of latent attention
    experts            `moe/experts/lora_experts`: the same in grouped products

B begins at zero, so a model with fresh adapters computes what it did without.
"""

from __future__ import annotations

import torch
from torch import nn

from moeclipse.model.blocks import Linear, Settings
from moeclipse.model.lora_config import ADAPTER, LoraConfig


class LoraColumn(nn.Module):
    """Beside a linear that is cut along its outputs, `unit` of which stay together."""

    def __init__(
        self, d_in: int, d_out: int, name: str, settings: Settings, lora: LoraConfig, unit: int
    ) -> None:
        super().__init__()
        self.scale = lora.scale
        self.a = Linear(d_in, lora.rank, settings, f"{ADAPTER}{name}_a")
        self.b = settings.column(lora.rank, d_out, f"{ADAPTER}{name}", unit=unit)
        self.b.weight.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x))
        return self.scale * y


class LoraRow(nn.Module):
    """Beside a linear that is cut along its inputs."""

    def __init__(
        self, d_in: int, d_out: int, name: str, settings: Settings, lora: LoraConfig, unit: int
    ) -> None:
        super().__init__()
        self.scale = lora.scale
        self.a = settings.row(d_in, lora.rank, f"{ADAPTER}{name}", unit=unit)
        self.b = Linear(lora.rank, d_out, settings, f"{ADAPTER}{name}_b")
        self.b.weight.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x))
        return self.scale * y


class LoraWhole(nn.Module):
    """Beside a linear that is whole on every rank."""

    def __init__(self, d_in: int, d_out: int, name: str, settings: Settings, lora: LoraConfig) -> None:
        super().__init__()
        self.scale = lora.scale
        self.a = Linear(d_in, lora.rank, settings, f"{ADAPTER}{name}_a")
        self.b = Linear(lora.rank, d_out, settings, f"{ADAPTER}{name}_b")
        self.b.weight.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x))
        return self.scale * y
