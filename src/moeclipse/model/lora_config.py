"""Which parts of a model have low-rank adapters (`model/lora`), and of what rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TARGETS = ("q", "k", "v", "o", "experts")
PROJECTIONS = ("up", "down")
"""Of experts; `experts` names both."""
LATENT = {"q_down": "q", "q_up": "q", "kv_down": "kv", "kv_up": "kv"}
"""Projections of latent attention: q names both of queries, k or v both of keys and values."""
ADAPTER = "lora_"
"""In the name of every parameter of an adapter."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Train low-rank adapters and nothing else."""

    rank: int = 0
    """0: no adapters, the model itself is trained."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead: large ranks learn as fast as small ones."""
    targets: tuple[str, ...] = TARGETS
    """What has adapters: projections of attention (q, k, v, o; of latent attention also one by one: q_down,
    q_up, kv_down, kv_up), experts, or one of theirs (up, down)."""
    adapter: str = ""
    """A folder in PEFT's format that adapters begin from; empty: they begin at zero."""

    def problems(self) -> Iterator[str]:
        if self.rank < 0:
            yield f"lora.rank ({self.rank}) must not be negative; 0 is no adapters"
        if self.alpha <= 0:
            yield f"lora.alpha ({self.alpha}) must be positive"
        known = (*TARGETS, *PROJECTIONS, *LATENT)
        unknown = [target for target in self.targets if target not in known]
        if unknown or not self.targets:
            yield f"lora.targets ({list(self.targets)}) must be some of {', '.join(known)}"
        if self.adapter and not self.rank:
            yield f"lora.adapter ({self.adapter}) needs lora.rank, that of the adapter"

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """What two runs must have in common; nothing without adapters."""
        told: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}
        told |= {"rslora": True} if self.rslora else {}
        return {"lora": told} if self.rank else {}

    @property
    def projections(self) -> tuple[str, ...]:
        """Those of experts that have adapters."""
        both = "experts" in self.targets
        return tuple(name for name in PROJECTIONS if self.rank > 0 and (both or name in self.targets))

    def has(self, target: str) -> bool:
        """`experts`: any projection of them."""
        if target == "experts":
            return bool(self.projections)
        named = target in self.targets or any(short in self.targets for short in LATENT.get(target, ""))
        return target in self.projections or (self.rank > 0 and named)


NO_LORA = LoraConfig()


def is_adapter(name: str) -> bool:
    return ADAPTER in name
