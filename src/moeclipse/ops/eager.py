"""Functions that `torch.compile` leaves alone: a graph ends before them, and another begins behind.

`torch.compiler.disable` says the same, but loads the compiler when a function is defined: half a second of
every process, on each rank, for those who compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which no graph holds."""

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            found: R = torch.compiler.disable(function)(*args, **kwargs)
            return found
        return function(*args, **kwargs)

    return outside
