"""Which parts of a model have low-rank adapters (`model/lora`), and of what rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TARGETS = ("q", "k", "v", "o", "experts")
ADAPTER = "lora_"
"""In the name of every parameter of an adapter."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Train low-rank adapters and nothing else."""

    rank: int = 0
    """0: no adapters, the model itself is trained."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """What has adapters: projections of attention (q, k, v, o), and experts."""
    adapter: str = ""
    """A folder in PEFT's format that adapters begin from; empty: they begin at zero."""

    def problems(self) -> Iterator[str]:
        if self.rank < 0:
            yield f"lora.rank ({self.rank}) must not be negative; 0 is no adapters"
        if self.alpha <= 0:
            yield f"lora.alpha ({self.alpha}) must be positive"
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            yield f"lora.targets ({list(self.targets)}) must be some of {', '.join(TARGETS)}"
        if self.adapter and not self.rank:
            yield f"lora.adapter ({self.adapter}) needs lora.rank, that of the adapter"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """What two runs must have in common; nothing without adapters."""
        told = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}
        return {"lora": told} if self.rank else {}

    def has(self, target: str) -> bool:
        return self.rank > 0 and target in self.targets


NO_LORA = LoraConfig()


def is_adapter(name: str) -> bool:
    return ADAPTER in name
