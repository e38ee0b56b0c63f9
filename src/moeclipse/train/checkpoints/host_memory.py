"""Host memory for the copy of a rank's state, made ready in the background.

Idea. Fresh memory costs far more than the copy into it: on an H200 the 60 GB of a model of 5 B parameters
take half a minute to come and four seconds to be pinned, and are then copied in 1.2 seconds. So a thread
touches and pins them ahead, slice by slice.

Contract. `copy` waits until memory is ready, and cuts copies where slices meet: what is pinned in two calls
must not be copied to in one. Memory that cannot be pinned is used all the same, only slower.

Hazard. While a slice is pinned no kernel can be launched: slices are as short as that can be borne (70 ms).
`close` before the last reference goes: pinned memory must not vanish.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Protocol

import numpy as np
import torch

SLICE_BYTES = 1 << 30
PAGE_BYTES = 4096


class Pins(Protocol):
    """Whoever makes memory known to a device."""

    def pin(self, address: int, num_bytes: int) -> bool: ...

    def unpin(self, address: int) -> None: ...


class CudaPins:
    def pin(self, address: int, num_bytes: int) -> bool:
        runtime = torch.cuda.cudart()
        assert runtime is not None
        return int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0

    def unpin(self, address: int) -> None:
        runtime = torch.cuda.cudart()
        assert runtime is not None
        runtime.cudaHostUnregister(address)


class HostMemory:
    def __init__(self, num_bytes: int, pins: Pins | None = None, slice_bytes: int = SLICE_BYTES) -> None:
        """`pins`: for copies from a device; without it pages come when they are first written."""
        self.num_bytes, self.slice_bytes, self.pins = num_bytes, slice_bytes, pins
        self._pages = mmap.mmap(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._pinned: list[int] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if pins is not None:
            self._thread = threading.Thread(target=self._prepare, name="moeclipse-memory", daemon=True)
            self._thread.start()

    @property
    def ready(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def copy(self, offset: int, source: torch.Tensor) -> None:
        """The bytes of `source` to `offset`; from a device they may still be on their way."""
        self.settle()
        flat = source.detach().reshape(-1).view(torch.uint8)
        stop = offset + flat.numel()
        at = offset
        while at < stop:
            end = min(stop, (at // self.slice_bytes + 1) * self.slice_bytes)
            self.data[at:end].copy_(flat[at - offset : end - offset], non_blocking=True)
            at = end

    def settle(self) -> None:
        """Wait until the memory is as ready as it gets."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for address in self._pinned:
            assert self.pins is not None
            self.pins.unpin(address)
        self._pinned.clear()

    def _prepare(self) -> None:
        pages = np.frombuffer(self._pages, dtype=np.uint8)
        assert self.pins is not None
        for first in range(0, self.num_bytes, self.slice_bytes):
            if self._closed.is_set():
                return
            last = min(first + self.slice_bytes, self.num_bytes)
            pages[first:last:PAGE_BYTES] = 0  # without the interpreter's lock
            address = self.data.data_ptr() + first
            if not self.pins.pin(address, last - first):
                return  # the rest is copied as ordinary memory
            self._pinned.append(address)
