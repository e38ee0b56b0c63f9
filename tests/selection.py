"""Which tests run, and in which order: `--shard` for a part, `--shuffle` for orders nobody thought of."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

LONG_PART = Path(__file__).parent / "long_part.txt"
TURN_S = 3600
"""How long it is the turn of one shard."""


class Named(Protocol):
    @property
    def nodeid(self) -> str: ...


Item = TypeVar("Item", bound=Named)


class LongPart:
    """The list of `long_part.txt`."""

    def __init__(self, text: str) -> None:
        self.cases: dict[str, tuple[str, set[str]]] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, word, *cases = [*line.split("  "), ""]
                assert word in ("", "only", "but", "eighth"), f"{line}: only, but, eighth, two spaces between"
                assert f"tests/{name}" not in self.cases, f"{name} stands twice"
                self.cases[f"tests/{name}"] = word, {case for case in cases if case}

    def holds(self, name: str) -> bool:
        test, bracket, case = name.partition("[")
        word, cases = self.cases.get(test, ("only", {bracket + case}))
        if word == "eighth":
            return zlib.crc32(case.encode()) % 8 != 0
        return (bracket + case in cases) if word == "but" else (bracket + case not in cases)

    def holds_all_of(self, test: str) -> bool:
        """Whether the short suite keeps no case of a test."""
        return self.cases.get(test, ("but", ""))[0] == ""

    def stale(self, names: Iterable[str]) -> list[str]:
        """Tests that it names and nobody has, and those of which it keeps cases that nobody has: these would
        be left out without a word."""
        known = set(names)
        tests = {name.partition("[")[0] for name in known}
        gone = [test for test in self.cases if test not in tests]
        kept = {name.partition("[")[0] for name in known if not self.holds(name)}
        empty = [
            test
            for test, (word, _) in self.cases.items()
            if word in ("only", "eighth") and test in tests and test not in kept
        ]
        return gone + empty


SPREAD = (
    "tests/combinations/test_combinations.py",
    "tests/hf/test_parity.py",
    "tests/ops/triton/test_compiles.py",
    "tests/test_benches.py",
)
"""Files of many dear cases that share nothing: each case goes to a shard of its own."""


class Shard:
    """`2/8` or `next/8`. Files go to shards by a hash of their names, so that a test stays where it is when
    others come and go, and what the tests of a file share, references above all, is made in one shard."""

    def __init__(self, text: str) -> None:
        number, _, count = text.partition("/")
        self.count = int(count)
        self.number = 1 + int(time.time() // TURN_S) % self.count if number == "next" else int(number)
        if not 1 <= self.number <= self.count:
            raise pytest.UsageError(f"--shard {text}: the parts of {count} are 1/{count} to {count}/{count}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, name: str) -> bool:
        file = name.partition("::")[0]
        return zlib.crc32((name if file in SPREAD else file).encode()) % self.count == self.number - 1

    def has_none_of(self, file: str) -> bool:
        """Such a file need not even be read."""
        return file not in SPREAD and not self.holds(file)


def in_turn(items: Iterable[Item], late: Callable[[Item], bool]) -> list[Item]:
    """Files with many tests first, so that workers end together; those that are to come late behind them."""
    files = [list(tests) for _, tests in groupby(items, lambda item: item.nodeid.partition("::")[0])]
    files.sort(key=lambda tests: (late(tests[0]), -len(tests)))
    return [test for tests in files for test in tests]


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Files in random order, and the tests within each: what a file prepares is still shared."""
    order = random.Random(seed)
    files = [list(tests) for _, tests in groupby(items, lambda item: item.nodeid.partition("::")[0])]
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    return [test for tests in files for test in tests]
