"""How a layer's weights begin: from numbers alone, so that they do not depend on who holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class WeightInit:
    """Weights are normal numbers that follow from (seed, layer, what they are, which expert)."""

    layer: int = 0
    seed: int = 0
    std: float = 0.02
    down_std: float | None = None
    """Of the experts' second projection; None: as the others."""
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=self.device, dtype=self.dtype)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device=self.device, dtype=self.dtype)
