"""Nearly equal numbers, the same to all who plan: compared with half of their bits, equal ones by number.

It is the rule of `moe/gate/routing` for averages of loads, which are float64: the order of their sums must
not decide which of two equally busy experts moves.
"""

from __future__ import annotations

import numpy as np

DROPPED = 26
"""Of the 52 bits behind the first one of a float64."""


def half_of_bits(values: np.ndarray) -> np.ndarray:
    """Rounded to half of their digits; whole numbers below 2^26 stay, and no order is turned round."""
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.int64)
    rounded: np.ndarray = ((bits + (1 << DROPPED - 1)) & -(1 << DROPPED)).view(np.float64)
    return rounded.reshape(np.shape(values))
