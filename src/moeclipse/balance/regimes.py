"""How long loads stay as they are between two jumps: how many steps a plan has to pay for what it moves.

Idea. Loads that drift are followed, and a plan that is made for them holds for long. Loads that jump
(`balance/drift`) begin a new regime, and what was moved for one that is over was moved for nothing: a burst
of five steps does not pay for experts that take as long as two steps to move. How long a regime will last
nobody knows; how long others lasted is known. Of those that were about as uneven and lasted longer than this
one has so far, the mean of what was left is expected to be left; where there are none, as long as it has
lasted already. So the first burst is waited out, heat that moves every twenty steps is followed from its
second place on, and what turns out to stay is planned for a little later.

Before the first jump nothing is known to end: the configured lifetime counts (`placement.lifetime`).

Contract. Pure and deterministic, a function of the loads that all ranks know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

KEPT = 16
"""Regimes that are remembered."""
ALIKE = 0.5
"""A regime says something of another one that is at most twice as uneven."""
NUMBERS = 2 + 2 * KEPT


@dataclass(frozen=True, kw_only=True)
class Regimes:
    age: int = 0
    """Steps of the present one."""
    heat: float = 0.0
    """How uneven its steps were, added up."""
    past: tuple[tuple[int, float], ...] = ()
    """(steps, how uneven on average) of those before, the oldest first."""

    def add(self, rows_LE: np.ndarray, jumped: bool) -> Regimes:
        """After one more step, which is the first of a new one if loads have jumped."""
        heat = unevenness(rows_LE)
        if jumped:
            ended = (self.age, self.heat / max(self.age, 1))
            return Regimes(age=1, heat=heat, past=(*self.past, ended)[-KEPT:])
        return Regimes(age=self.age + 1, heat=self.heat + heat, past=self.past)

    def lasting(self, most: int) -> int:
        """Further steps for which loads are expected to stay as they are, at most so many."""
        if not self.past:
            return most
        left = self._left_of_others
        return min(round(sum(left) / len(left)) if left else self.age, most)

    @property
    def looks_again(self) -> bool:
        """Whether one that is like no other has become twice as old: more is known of it now."""
        doubled = self.age > 1 and math.log2(self.age).is_integer()
        return doubled and bool(self.past) and not self._left_of_others

    @property
    def _left_of_others(self) -> list[int]:
        """Steps that others as uneven had before them at this age."""
        like = ALIKE * self.heat / max(self.age, 1)
        return [steps - self.age for steps, heat in self.past if heat >= like and steps > self.age]

    def numbers(self) -> list[float]:
        """What a checkpoint holds; empty places are zeros."""
        found = [float(self.age), self.heat, *(number for one in self.past for number in one)]
        return found + [0.0] * (NUMBERS - len(found))

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> Regimes:
        age, heat, *rest = numbers
        past = tuple((int(steps), each) for steps, each in zip(rest[::2], rest[1::2], strict=True) if steps)
        return cls(age=int(age), heat=heat, past=past)


def unevenness(rows_LE: np.ndarray) -> float:
    """How far experts are from the mean of their layer: root mean square, in means."""
    part_LE = rows_LE / np.maximum(rows_LE.mean(-1, keepdims=True), 1e-300)
    return float(np.sqrt(((part_LE - 1) ** 2).mean()))
