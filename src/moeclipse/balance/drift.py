"""How fast loads drift, and how long an average should remember.

Idea: an expert's part of the rows walks at random, and each step shows it with noise. Two distances between
steps tell both apart (q: what a step drifts, r: the noise, as mean squares over experts):

    one step apart     q + 2 r            LAG steps apart     LAG q + 2 r

The average that comes closest to the next step is then the one of Kalman's filter in its steady state, whose
gain is p / (p + r) with p = (q + sqrt(q^2 + 4 q r)) / 2; what a step leaves of the past is one minus that.
Loads that stand still are averaged over many steps, loads that run are followed. The same two numbers say how
far off the average will be some steps ahead, which is what plans have to bear (`balance/futures`).

A step that is JUMP times as far from the one before as steps usually are is no drift: the loads are others
from now on, whatever was there before says nothing of them (`jumped`), and neither distance counts it. Of
some 1,400 recorded steps of young models none is so far off; hot experts that change, or a burst, are 20 to
150 times beyond.

Contract: pure and deterministic; ranks that add the same loads have the same decay. Nothing is known before
two distances of LAG steps have been seen: until then the decay is that of `FIRST`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

LAG = 8
FIRST = 0.9
LEAST, MOST = 0.2, 0.98
UNKNOWN = 0.02
"""The error of an average, in mean loads, while nothing is known."""
MEMORY = 0.95
"""What a step leaves of the distances before."""
NUMBERS = 5
JUMP = 9.0
"""In mean squares: three times as far."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    last_LE: np.ndarray | None = None
    """Parts of the rows, of the step before, ..."""
    anchor_LE: np.ndarray | None = None
    """... and of the last step that far ones are compared with."""
    age: int = 0
    """Steps since then."""
    near: float = 0.0
    """Mean square of a step's change, ..."""
    near_weight: float = 0.0
    far: float = 0.0
    """... and of that of LAG steps."""
    far_weight: float = 0.0
    jumped: bool = False
    """Whether the last step was far from the one before."""

    def add(self, rows_LE: np.ndarray) -> Drift:
        """After one more step."""
        part_LE = rows_LE / np.maximum(rows_LE.sum(-1, keepdims=True), 1)
        if self.last_LE is None or self.anchor_LE is None:
            return Drift(last_LE=part_LE, anchor_LE=part_LE)
        change = _square(part_LE - self.last_LE)
        if self._known and change > JUMP * self.near / self.near_weight:
            return replace(self, last_LE=part_LE, anchor_LE=part_LE, age=0, jumped=True)
        near = MEMORY * self.near + (1 - MEMORY) * change
        near_weight = MEMORY * self.near_weight + (1 - MEMORY)
        if self.age + 1 < LAG:
            return Drift(
                last_LE=part_LE,
                anchor_LE=self.anchor_LE,
                age=self.age + 1,
                near=near,
                near_weight=near_weight,
                far=self.far,
                far_weight=self.far_weight,
            )
        kept = MEMORY**LAG
        return Drift(
            last_LE=part_LE,
            anchor_LE=part_LE,
            near=near,
            near_weight=near_weight,
            far=kept * self.far + (1 - kept) * _square(part_LE - self.anchor_LE),
            far_weight=kept * self.far_weight + (1 - kept),
        )

    @property
    def decay(self) -> float:
        """What a step should leave of the average."""
        if not self._known:
            return FIRST
        walk, noise = self._walk_and_noise()
        if walk + noise == 0:
            return MOST
        return min(max(noise / (_filtered(walk, noise) + noise), LEAST), MOST)

    def error(self, steps: float) -> float:
        """How far loads will be from their average so many steps ahead: root mean square, in mean loads."""
        if self.last_LE is None or not self._known:
            return UNKNOWN
        walk, noise = self._walk_and_noise()
        return math.sqrt(_filtered(walk, noise) + steps * walk + noise) * self.last_LE.shape[-1]

    @property
    def _known(self) -> bool:
        return self.far_weight > 1 - MEMORY**LAG

    def _walk_and_noise(self) -> tuple[float, float]:
        near, far = self.near / self.near_weight, self.far / self.far_weight
        walk = max((far - near) / (LAG - 1), 0.0)
        return walk, max((near - walk) / 2, 0.0)

    def numbers(self) -> list[float]:
        """What a checkpoint holds beside the two tables."""
        return [float(self.age), self.near, self.near_weight, self.far, self.far_weight]

    @classmethod
    def from_numbers(cls, numbers: list[float], last_LE: np.ndarray, anchor_LE: np.ndarray) -> Drift:
        age, near, near_weight, far, far_weight = numbers
        return cls(
            last_LE=last_LE,
            anchor_LE=anchor_LE,
            age=int(age),
            near=near,
            near_weight=near_weight,
            far=far,
            far_weight=far_weight,
        )


def _filtered(walk: float, noise: float) -> float:
    """What the best average is off from the next step's true load, as a mean square."""
    return (walk + math.sqrt(walk * walk + 4 * walk * noise)) / 2


def _square(change_LE: np.ndarray) -> float:
    return float((change_LE * change_LE).mean())
