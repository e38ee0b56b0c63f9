"""The memory of a process in large pages, before it forks hundreds of ranks.

A fork copies the table of its parent's pages, and its end takes it down: with 600 MiB in pages of 4 KiB that
is half of what two ranks cost that do nothing. Linux puts memory into pages of 2 MiB when it is asked to
(madvise, MADV_COLLAPSE, since 6.1); older kernels refuse, and nothing is lost but time.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

COLLAPSE = 25
LARGE = 1 << 21


def use_large_pages() -> int:
    """Bytes that lie in large pages now."""
    if sys.platform != "linux":
        return 0
    advise, taken = ctypes.CDLL(None).madvise, 0
    for first, end in private_memory(Path("/proc/self/maps").read_text()):
        start, length = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
        taken += end - first if advise(start, length, COLLAPSE) == 0 else 0
    return taken


def private_memory(maps: str) -> list[tuple[int, int]]:
    """Stretches of whole large pages that belong to no file and to nobody else."""
    found = []
    for line in maps.splitlines():
        where, rights, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in where.split("-"))
            first, end = -(-first // LARGE) * LARGE, end // LARGE * LARGE
            found += [(first, end)] if first < end else []
    return found
