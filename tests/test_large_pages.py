"""What is moved into large pages, and that memory stays what it was."""

from __future__ import annotations

import numpy as np

from large_pages import LARGE, private_memory, use_large_pages

MAPS = """\
55933275a000-559342762000 r-xp 00002000 fe:00 260386                     /usr/bin/head
559342762000-559362762000 rw-p 00000000 00:00 0                          [heap]
7f1e00001000-7f1e00c01000 rw-p 00000000 00:00 0
7f1e10000000-7f1e20000000 rw-s 00000000 00:01 77                         /dev/shm/torch 1 (deleted)
7f1e30000000-7f1e40000000 rw-p 00000000 fe:00 338944                     /usr/lib/libtorch.so
7f1e50000000-7f1e50100000 rw-p 00000000 00:00 0
7ffff16f8000-7ffff1719000 rw-p 00000000 00:00 0                          [stack]
"""


def test_whole_large_pages_that_belong_to_nobody_else() -> None:
    assert private_memory(MAPS) == [(0x559342800000, 0x559362600000), (0x7F1E00200000, 0x7F1E00C00000)]


def test_memory_stays_what_it_was() -> None:
    numbers = np.arange(4 * LARGE, dtype=np.uint8)
    before = numbers.copy()
    assert use_large_pages() >= 0
    assert np.array_equal(numbers, before)
