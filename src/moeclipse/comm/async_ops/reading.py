"""Asynchronous host-device copies: neither side waits.

Idea. A `.tolist()` stops the host until the device has done everything before it, and the device then waits
for what the host launches next. A reading copies behind what is queued now; the host launches on, and waits
for the copy alone. `send` is the other way: from memory that the device reads by itself.

On CUDA a kernel moves the bytes, from or to pinned memory that it sees under the same address: a copy would
stand behind all that copy engines have been given (`host_lane`), 100 ms of a step whose state lies on the
host.

Contract: a reading is an `InFlight` of nested lists. `get` waits no longer than the deadline; on the CPU
nothing waits.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from moeclipse.comm.async_ops.lane import poll
from moeclipse.comm.failure import Watch

MOST = 4 << 20
"""Bytes that a kernel moves; of more a copy engine is faster."""
HELD: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
"""Pinned memory until its kernel has run: the allocator knows of copies alone."""


def send(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`value`, which is on the host, on the device."""
    if device.type != "cuda" or not value.numel():
        return value.to(device)
    pinned = value.contiguous().pin_memory()
    if value.nbytes > MOST:
        return pinned.to(device, non_blocking=True)
    found = torch.empty(value.shape, dtype=value.dtype, device=device)
    move(found, pinned, pinned)
    return found


def move(into: torch.Tensor, source: torch.Tensor, pinned: torch.Tensor) -> torch.cuda.Event:
    """By a kernel of the current stream; one of both is `pinned`. The event is when that has run."""
    device = source.device if source.is_cuda else into.device
    words = torch.int64 if into.nbytes % 8 == 0 else torch.uint8
    there, here = (flat(tensor, device).view(words) for tensor in (into, source))
    torch.bitwise_or(here, 0, out=there)
    event = torch.cuda.Event()
    event.record()
    while HELD and HELD[0][0].query():
        HELD.popleft()
    HELD.append((event, pinned))
    return event


def flat(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bytes of a contiguous tensor as kernels of the device see them, without holding them."""
    return torch.as_tensor(Address(tensor), device=device)


class Address:
    """Where the bytes of a tensor are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


class Reading:
    """`value` as it is at this point of the current stream; `ranks` are those it may have to wait for."""

    def __init__(self, value: torch.Tensor, watch: Watch, label: str, ranks: tuple[int, ...]) -> None:
        self._watch, self._label, self._ranks = watch, label, ranks
        self._value, self._event = value, None
        if value.is_cuda and value.numel():
            value = value.contiguous()
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._event = move(self._value, value, self._value)

    def tensor(self) -> torch.Tensor:
        """As a tensor on the host."""
        if self._event is not None:
            poll(self._event, self._watch, self._label, self._ranks)
        return self._value

    def get(self) -> list[Any]:
        found: list[Any] = self.tensor().tolist()
        return found
