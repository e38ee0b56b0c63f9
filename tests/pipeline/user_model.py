"""A user's own model: layers that know nothing of parts, and microbatches of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH, ROWS, LAYERS, M = 6, 5, 4, 4


class Block(nn.Module):
    """A user's layer: it knows nothing of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, h: torch.Tensor, microbatch: Any) -> torch.Tensor:
        return h + self.down(self.dropout(torch.tanh(self.up(h)))) * (1 + microbatch.number)


@dataclass
class Rows:
    number: int
    x: torch.Tensor
    loss: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.x)


@dataclass
class UserStage:
    layers: list[nn.Module]
    embed: Any
    head: Any


def model() -> tuple[nn.Parameter, list[Block]]:
    torch.manual_seed(3)
    scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    return scale, [Block().double() for _ in range(LAYERS)]


def data() -> list[Rows]:
    torch.manual_seed(4)
    return [Rows(m, torch.randn(ROWS + m % 2, WIDTH, dtype=torch.float64)) for m in range(M)]
