"""Tensors in this rank's peer memory, for results that peers write where they are wanted.

    arena = Arena(memory.view(index, torch.uint8, offset, count), offset)
    taken = arena.take((rows, width), torch.float32)        # None: no room, use memory of one's own
    if taken is not None:
        tensor, place = taken                               # `place`: bytes from the start of the buffer

The memory of a tensor comes back when the last tensor that shares its storage is gone, on whatever thread
that happens. Whoever lets a peer write to a tensor keeps it until the peer has.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

ALIGN = 64  # a cache line: no tensor shares one with its neighbour


class Arena:
    def __init__(self, memory: torch.Tensor, offset: int) -> None:
        as_buffer: Any = memory.numpy()
        self._bytes = memoryview(as_buffer)
        self._offset, self._address = offset, memory.data_ptr()
        self.num_bytes = memory.numel()
        self._starts: list[int] = []  # of what is taken, in order
        self._taken: dict[int, tuple[int, Any]] = {}  # start -> (end, what tells us that it came back)
        self._returned: deque[int] = deque()  # appending is atomic: tensors die on any thread

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, int] | None:
        """A tensor of that shape and its place in the buffer, or None."""
        num_bytes = math.prod(shape) * dtype.itemsize
        while self._returned:
            back = self._returned.popleft()
            self._starts.remove(back)
            del self._taken[back]
        start = self._gap(num_bytes)
        if start is None or not num_bytes:
            return None
        piece = self._bytes[start : start + num_bytes]
        end = start + -(-num_bytes // ALIGN) * ALIGN
        self._starts.insert(bisect(self._starts, start), start)
        self._taken[start] = (end, weakref.ref(piece, partial(_give_back, self._returned, start)))
        return torch.frombuffer(piece, dtype=dtype).view(*shape), self._offset + start

    def place_of(self, x: torch.Tensor) -> int | None:
        """Where in the buffer a tensor of this arena lies; None for other tensors."""
        start = x.data_ptr() - self._address
        return self._offset + start if 0 <= start < self.num_bytes else None

    def _gap(self, num_bytes: int) -> int | None:
        """The first place with that much room."""
        end = 0
        for start in self._starts:
            if start - end >= num_bytes:
                return end
            end = self._taken[start][0]
        return end if self.num_bytes - end >= num_bytes else None


def _give_back(returned: deque[int], start: int, _: object) -> None:
    returned.append(start)
