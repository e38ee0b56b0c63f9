"""A layout: axes, schedule, microbatches, what is recomputed, and what lies on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moeclipse.core.errors import ScheduleError
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
    inputs: bool = False
    """Inputs of layers, which are all recomputed whole, lie there between forward and backward."""
    weights: bool = False
    """Weights of experts do, and visit the device for both."""

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
        away += ", inputs on the host" if self.inputs else ""
        away += ", experts on the host" if self.weights else ""
        each = f"{self.microbatches} x {self.samples}"
        return f"{axes}{name}{stages}, {each}, recompute {self.recompute}{away}"

    @property
    def layer_at_a_time(self) -> bool:
        """Whether gradients of a layer are complete before those of the next begin."""
        return self.num_ranks == 1 and (self.microbatches == 1 or self.schedule == "layers")


def even_stages(seconds: Sequence[float], head: float, num_stages: int) -> tuple[int, ...]:
    """Cut layers into contiguous stages whose longest is as short as can be; the last one has the head.

    Among those with that longest, stages in front are filled first.
    """
    num_layers = len(seconds)
    if num_layers < num_stages:
        raise ScheduleError(f"{num_stages} stages need a layer each, but there are {num_layers}")
    total = np.concatenate([[0.0], np.cumsum(seconds)])

    def cut(limit: float) -> list[int] | None:
        """Last stage first, each as long as the limit lets it be, with a layer left for every other."""
        counts, last, room = [], num_layers, limit - head
        for left in range(num_stages - 1, -1, -1):
            first = last - 1
            while first > left and total[last] - total[first - 1] <= room * (1 + 1e-12):
                first -= 1
            if first < left or total[last] - total[first] > room * (1 + 1e-12):
                return None
            counts.append(last - first)
            last, room = first, limit
        return counts[::-1] if last == 0 else None

    low, high = max(max(seconds), head), float(total[-1]) + head
    best = [num_layers - num_stages + 1, *[1] * (num_stages - 1)]
    for _ in range(50):
        middle = (low + high) / 2
        found = cut(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return tuple(best)
