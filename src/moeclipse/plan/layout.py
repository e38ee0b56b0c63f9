"""A layout: axes, schedule, microbatches, what is recomputed, and how much state lies on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeclipse.schedule.shape import Recompute


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Axes, schedule and microbatches of one step."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    microbatches: int = 1
    samples: int = 1
    """Sequences of a microbatch, of one data index."""
    recompute: Recompute = "off"
    overlap: Literal["off", "pair"] = "off"
    budget: int = 0
    """Of zb-m: microbatches that a rank may hold."""
    host: float = 0.0
    """Part of the optimizer's state that lies in the host's memory."""

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    @property
    def num_stages(self) -> int:
        """Of one copy of the model."""
        return self.pp * self.stages_per_rank // self.copies

    @property
    def copies(self) -> int:
        """Of the model: DualPipe keeps two."""
        return 2 if self.schedule == "dualpipe" else 1

    @property
    def title(self) -> str:
        axes = " ".join(f"{axis}{getattr(self, axis)}" for axis in ("pp", "dp", "ep", "tp"))
        plain = self.pp == 1 and self.schedule == "1f1b"
        name = "" if plain else ", pairs" if self.schedule == "pp1" else f", {self.schedule}"
        several = self.schedule.startswith("vpp") or (self.schedule == "zb-m" and self.stages_per_rank > 1)
        stages = f" x {self.stages_per_rank}" if several else ""
        stages += f" of {self.budget}" if self.budget else ""
        away = f", host {self.host:.0%}" if self.host else ""
        each = f"{self.microbatches} x {self.samples}"
        return f"{axes}{name}{stages}, {each}, recompute {self.recompute}{away}"

    @property
    def layer_at_a_time(self) -> bool:
        """Whether gradients of a layer are complete before those of the next begin."""
        return self.num_ranks == 1 and (self.microbatches == 1 or self.schedule == "layers")
