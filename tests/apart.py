"""Tests that take gradients, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from moeclipse.testing.run_ranks import run_alone


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """The same test in a fork: backward on a machine with a GPU starts threads that no later fork survives.

    What a test draws from hypothesis, it must be given: the parent knows nothing of what the fork draws.
    """

    @wraps(test)
    def forked(*args: Any, **options: Any) -> None:
        run_alone(lambda _mesh: test(*args, **options))

    return forked
