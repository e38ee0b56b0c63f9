"""A short convolution between two factors, in place of attention (LFM2).

    write, read, x = projections of the input          each as wide as the model
    y = out(read * conv(write * x))

Each channel by itself, so tensor parallelism cuts channels. With a cache the last inputs of the convolution
are kept (`model/cache`).
"""

from __future__ import annotations

import torch
from torch import nn

from moeclipse.model.blocks import Settings
from moeclipse.model.config import ModelConfig
from moeclipse.model.rotary import Positions
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.short_conv import last_inputs, short_conv


class ShortConv(nn.Module):
    """Of some channels, with what a cache has of the tokens before."""

    def __init__(
        self, channels: int, width: int, unit: int, settings: Settings, name: str, number: int
    ) -> None:
        """`unit` neighbours stay on one rank; `number`: of what it keeps in a cache."""
        super().__init__()
        self.layer, self.number = settings.layer, number
        self.weight = settings.cut((channels, width), f"conv_{name}", unit=unit, std=(3 * width) ** -0.5)

    def forward(self, x_TC: torch.Tensor, positions: Positions) -> torch.Tensor:
        """[B, S, C]."""
        x_BSC = x_TC.view(-1, positions.length, x_TC.shape[1])
        call, place_BS = positions.cache, positions.place if positions.place.dim() == 2 else None
        if call is None:
            return short_conv(x_BSC, self.weight, place_BS=place_BS)
        before, reach = call.cache.state(self.layer, self.number), self.weight.shape[1] - 1
        y_BSC = short_conv(x_BSC, self.weight, place_BS=place_BS, before_BPC=before)
        call.cache.keep(self.layer, self.number, last_inputs(x_BSC, before, reach, call.count_B))
        return y_BSC


class ConvMixer(nn.Module):
    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__()
        d = config.d_model
        self.inputs = settings.column(d, 3 * d, "inputs", blocks=3)
        self.conv = ShortConv(d, config.conv_width, 1, settings, "inputs", 0)
        self.out = settings.row(d, d, "out")

    def forward(self, x_TD: torch.Tensor, positions: Positions, _: Tokens | None = None) -> torch.Tensor:
        write_TC, read_TC, x_TC = self.inputs(x_TD).chunk(3, dim=1)
        mixed_BSC = self.conv(write_TC * x_TC, positions)
        y_TD: torch.Tensor = self.out(read_TC * mixed_BSC.flatten(0, 1))
        return y_TD
