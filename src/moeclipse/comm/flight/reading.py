"""Numbers on their way from the device to the host, read when they are wanted.

Idea. A `.tolist()` stops the host until the device has done everything before it, and the device then waits
for what the host launches next. A reading copies behind what is queued now; the host launches on, and waits
for the copy alone.

Contract: an `InFlight` of nested lists. `get` waits no longer than the deadline; on the CPU nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.flight.lane import poll


class Reading:
    """`value` as it is at this point of the current stream; `ranks` are those it may have to wait for."""

    def __init__(self, value: torch.Tensor, watch: Watch, label: str, ranks: tuple[int, ...]) -> None:
        self._watch, self._label, self._ranks = watch, label, ranks
        self._value, self._event = value, None
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tensor(self) -> torch.Tensor:
        """As a tensor on the host."""
        if self._event is not None:
            poll(self._event, self._watch, self._label, self._ranks)
        return self._value

    def get(self) -> list[Any]:
        found: list[Any] = self.tensor().tolist()
        return found
