"""The numbers of a step that every rank tells every other, in one message, and what follows from them.

    loss | aux loss | dropped rows | squares of gradients | corrupted | signals | sources | layers

Of them come the gradient norm, by which the update is clipped before the host has seen it, whether the step
counts, and how many in a row did not. Behind the first six, which every step has, are the loss of each source
(`train/data/sources`) and the squares of each layer (`train/step/clip`), where they are asked for.

A factor on the loss keeps the gradients of half-precision models inside their range (`LossScale`). float16
knows no number between 0 and 6e-8, and gradients of activations are often smaller. So the loss is multiplied
before backward and gradients, summed in fp32, are divided behind it. Factors are powers of two: they change
exponents and nothing else, so where nothing was too small or too large before, the update is the same to the
bit. "auto" begins high for float16 and looks for the highest factor that does not overflow: a step whose loss
is finite and whose gradients are not is skipped and halves the factor, and many good steps in a row double
it. All other types have the range of float32 and get 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moeclipse.core.errors import DivergedError
from moeclipse.core.steps import nth

LOSS, AUX_LOSS, DROPPED, SQUARES, CORRUPTED, SIGNALS = range(6)
"""Places in the message of a rank."""
OF_EVERY_STEP = SIGNALS + 1
FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROW_AFTER = 1000
"""Good steps in a row."""


def norm_if_good(results: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient norm, on the device; NaN where the step must not change anything.

    `results`: sums over all ranks, added in the order of ranks: all decide alike, to the bit.
    """
    loss, squares, corrupted = (results[place] for place in (LOSS, SQUARES, CORRUPTED))
    good = loss.isfinite() & squares.isfinite() & (corrupted == 0)
    return torch.where(good, squares.sqrt() / scale, math.nan)


@dataclass(frozen=True, kw_only=True)
class StepResults:
    """Of all ranks."""

    loss: float
    """The mean over the targets of all ranks."""
    aux_loss: float
    dropped: int
    norm: float
    losses: list[float]
    """Sums of each rank."""
    signals: list[int]
    """Of each rank."""
    of_sources: list[float]
    """Sums of losses."""
    skipped: bool
    """Something was not finite: weights and state stay as they are."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], targets: int, scale: float) -> StepResults:
        """`rows` are the ranks' messages; gradients are `scale` times theirs."""
        sums = [sum(column) for column in zip(*rows, strict=True)]
        loss = sums[LOSS] / targets
        norm = math.sqrt(sums[SQUARES]) / scale if sums[SQUARES] >= 0 else math.nan
        return cls(
            loss=loss,
            aux_loss=sums[AUX_LOSS],
            dropped=int(sums[DROPPED]),
            norm=norm,
            losses=[row[LOSS] for row in rows],
            signals=[int(row[SIGNALS]) for row in rows],
            of_sources=sums[OF_EVERY_STEP:],
            skipped=not (math.isfinite(loss) and math.isfinite(norm)),
        )


class BadSteps:
    """Steps in a row that were not finite; too many of them are the end."""

    def __init__(self, most: int) -> None:
        self.most, self.count, self.why = most, 0, ""

    def add(self, step: int, skipped: bool, loss: float, norm: float) -> None:
        self.count = self.count + 1 if skipped else 0
        if self.count >= self.most:
            raise DivergedError(
                f"{self.count} steps in a row, up to step {nth(step)}, had a non-finite loss ({loss}) or "
                f"gradient norm ({norm}); lower optim.lr, or resume from an earlier checkpoint. "
                f"Of the first of them: {self.why or 'nothing is known'}"
            )


class LossScale:
    def __init__(self, wanted: float | Literal["auto"], dtype: torch.dtype) -> None:
        self.dynamic = wanted == "auto" and dtype == torch.float16
        self.value = FIRST if self.dynamic else 1.0 if wanted == "auto" else float(wanted)
        self.good_steps = 0

    def after_step(self, loss: float, norm: float) -> bool:
        """Adapt; whether gradients overflowed for the factor alone, so that the step was not a bad one."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.good_steps += 1
            if self.dynamic and self.good_steps >= GROW_AFTER:
                self.value, self.good_steps = min(2 * self.value, MOST), 0
            return False
        self.good_steps = 0
        if not self.dynamic or not math.isfinite(loss) or self.value <= LEAST:
            return False
        self.value /= 2
        return True

    def state(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, state: Mapping[str, float] | None) -> None:
        """Go on where a run stopped; a factor that is given stays what it is."""
        if self.dynamic and state is not None:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
