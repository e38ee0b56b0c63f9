"""Numbers on their way between host and device, without either of them waiting.

Idea. A `.tolist()` stops the host until the device has done everything before it, and the device then waits
for what the host launches next. A reading copies behind what is queued now; the host launches on, and waits
for the copy alone. `send` is the other way: from memory that the device reads by itself.

Contract: a reading is an `InFlight` of nested lists. `get` waits no longer than the deadline; on the CPU
nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.comm.async_ops.lane import poll
from moeclipse.comm.failure import Watch


def send(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`value`, which is on the host, on the device."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


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
