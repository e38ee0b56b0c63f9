"""A reduction over peer memory that was begun.

`PeerAllReduce.begin_*` return it: the input is where peers can read it, and the rest, waiting for theirs and
reading them, is done by `get`, or by the next call of the same all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


class BegunReduction:
    """An `InFlight`. Hazard: its tensors must not change before `get` returns."""

    def __init__(
        self,
        steps: Iterator[None] | None,
        value: torch.Tensor,
        complete: Callable[[], None],
        arrived: Callable[[], bool],
    ) -> None:
        self._steps, self.value, self._complete, self._arrived = steps, value, complete, arrived

    def advance(self) -> bool:
        """Run on to the next place where it may be left open; whether there is one. For its owner."""
        if self._steps is not None:
            for _ in self._steps:
                return True
            self._steps = None
        return False

    @property
    def ready(self) -> bool:
        """Whether all peers have begun, too."""
        return self._steps is None or self._arrived()

    def get(self) -> torch.Tensor:
        if self._steps is not None:
            self._complete()
        return self.value
