"""A factor on the loss that keeps the gradients of half-precision models inside their range.

float16 knows no number between 0 and 6e-8, and gradients of activations are often smaller. So the loss is
multiplied before backward and gradients, summed in fp32, are divided behind it. Factors are powers of two:
they change exponents and nothing else, so where nothing was too small or too large before, the update is the
same to the bit.

"auto" begins high for float16 and looks for the highest factor that does not overflow: a step whose loss is
finite and whose gradients are not is skipped and halves the factor, and many good steps in a row double it.
All other types have the range of float32 and get 1.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROW_AFTER = 1000
"""Good steps in a row."""


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

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Go on where a run stopped; a factor that is given stays what it is."""
        if self.dynamic and state is not None:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
