"""Shards hold every test once; shuffled tests stay with their file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import pytest

import selection
from selection import LONG_PART, SPREAD, LongPart, Shard, in_turn, shuffled


@dataclass(frozen=True)
class Item:
    nodeid: str


NAMES = [f"tests/test_{file}.py::test_{number}" for file in "abc" for number in range(40)]


def shards(count: int) -> list[Shard]:
    return [Shard(f"{number}/{count}") for number in range(1, count + 1)]


def test_every_test_is_in_one_shard_with_all_of_its_file_and_shards_are_of_a_size() -> None:
    names = [f"tests/test_{number}.py::test_{kind}[{number}]" for number in range(120) for kind in "ab"]
    parts = [[name for name in names if shard.holds(name)] for shard in shards(4)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(len(part) > 30 for part in parts)
    for name in names:
        assert [shard.holds(name) for shard in shards(4)] == [shard.holds(twin(name)) for shard in shards(4)]


def twin(name: str) -> str:
    return name.replace("::test_a", "::test_b")


def test_files_of_other_shards_are_not_read_and_cases_that_share_nothing_are_spread() -> None:
    files = {name.partition("::")[0] for name in NAMES}
    assert all(sum(not shard.has_none_of(file) for shard in shards(8)) == 1 for file in files)
    for file in SPREAD:
        assert (LONG_PART.parent.parent / file).exists()
        parts = [[n for n in range(400) if shard.holds(f"{file}::test_it[{n}]")] for shard in shards(8)]
        assert all(len(part) > 30 for part in parts)
        assert not any(shard.has_none_of(file) for shard in shards(8))


def test_each_hour_is_the_turn_of_the_next_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    for hour in range(6):
        monkeypatch.setattr(selection.time, "time", lambda hour=hour: 3600.0 * (4_000_000 + hour))
        turns.append(str(Shard("next/4")))
    assert turns == ["1/4", "2/4", "3/4", "4/4", "1/4", "2/4"]


def test_the_long_part_is_a_list_of_tests_and_cases() -> None:
    part = LongPart("# why\na.py::test_a\na.py::test_b  only  [x y]  [z]\na.py::test_c  but  [x]\n")
    many = LongPart("a.py::test_a  eighth\n")
    assert 8 < sum(not many.holds(f"tests/a.py::test_a[{case}]") for case in range(100)) < 18
    names = ["a.py::test_a", "a.py::test_a[x]", "a.py::test_b[x y]", "a.py::test_b[z]", "a.py::test_b[w]"]
    names += ["a.py::test_c[x]", "a.py::test_c[y]", "a.py::test_d"]
    held = [name for name in names if part.holds(f"tests/{name}")]
    assert held == ["a.py::test_a", "a.py::test_a[x]", "a.py::test_b[w]", "a.py::test_c[x]"]
    assert [part.holds_all_of(f"tests/a.py::test_{name}") for name in "abcd"] == [True, False, False, False]


def test_what_the_long_part_names_in_vain_is_told() -> None:
    part = LongPart("a.py::test_a\na.py::test_b  only  [x]  [y]\na.py::test_c  only  [x]\n")
    assert part.stale(["tests/a.py::test_b[y]", "tests/a.py::test_c[z]"]) == [
        "tests/a.py::test_a",
        "tests/a.py::test_c",
    ]
    assert not part.stale(["tests/a.py::test_a", "tests/a.py::test_b[x]", "tests/a.py::test_c[x]"])
    few = LongPart("a.py::test_a  eighth\n")
    names = [f"tests/a.py::test_a[{case}]" for case in range(100)]
    assert few.stale([name for name in names if few.holds(name)]) == ["tests/a.py::test_a"]
    assert not few.stale(names)


@pytest.mark.parametrize("text", ["0/4", "5/4"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="the parts of 4 are 1/4 to 4/4"):
        Shard(text)


def test_long_files_come_first_and_what_makes_forks_dear_last() -> None:
    names = ["b.py::test_1", "c.py::test_1", "c.py::test_2", "a.py::test_1", "a.py::test_2", "a.py::test_3"]
    found = in_turn(map(Item, names), late=lambda item: item.nodeid.startswith("a.py"))
    assert [item.nodeid for item in found] == [*names[1:3], names[0], *names[3:]]


def test_shuffled_tests_stay_with_their_file_and_a_seed_is_an_order() -> None:
    tests = [Item(name) for name in NAMES]
    once, again, other = shuffled(tests, 1), shuffled(tests, 1), shuffled(tests, 2)
    assert once == again
    assert once != other
    assert sorted(once, key=place) == tests
    files = [file for file, _ in groupby(once, lambda test: test.nodeid.partition("::")[0])]
    assert len(files) == 3
    assert once[:40] != tests[:40]


def place(test: Item) -> int:
    return NAMES.index(test.nodeid)
