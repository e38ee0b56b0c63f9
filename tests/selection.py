"""Which tests run, and in which order: `--shard` for a part, `--shuffle` for orders nobody thought of."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, TypeVar

import pytest

TURN_S = 3600
"""How long it is the turn of one shard."""


class Named(Protocol):
    @property
    def nodeid(self) -> str: ...


Item = TypeVar("Item", bound=Named)


class Shard:
    """`2/8` or `next/8`. Tests go to shards by a hash of their names, so that a test stays where it is when
    others come and go, and the cases of one expensive test are spread."""

    def __init__(self, text: str) -> None:
        number, _, count = text.partition("/")
        self.count = int(count)
        self.number = 1 + int(time.time() // TURN_S) % self.count if number == "next" else int(number)
        if not 1 <= self.number <= self.count:
            raise pytest.UsageError(f"--shard {text}: the parts of {count} are 1/{count} to {count}/{count}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self.count == self.number - 1


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Files in random order, and the tests within each: what a file prepares is still shared."""
    order = random.Random(seed)
    files = [list(tests) for _, tests in groupby(items, lambda item: item.nodeid.partition("::")[0])]
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    return [test for tests in files for test in tests]
