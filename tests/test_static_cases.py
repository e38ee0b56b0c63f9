"""Cases are known from the source where it says them, and anything may stand where it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import house
from selection import LongPart
from static_cases import declared_tests

TABLES = "NAMES = {'a b': 1}\nNAMES['c'] = 2\nfor number in range(2):\n    LATE = [number]\n"
SOURCE = """
    import enum, re
    from itertools import product
    import pytest, torch
    from tables import LATE, NAMES as KNOWN
    from gone import ELSEWHERE

    class Kind(enum.Enum):
        ONE = 1

    class Point:
        pass

    def double(number):
        return 2 * number

    NUMBERS = [double(n) for n in range(3) if n]
    NUMBERS += [9]
    DTYPES = [torch.float32, torch.float64]
    SOME = [dtype for dtype in DTYPES if dtype.is_floating_point]
    wide = pytest.mark.parametrize("w", [True, None])

    def test_plain(): ...

    @wide
    @pytest.mark.usefixtures("tmp_path")
    @pytest.mark.parametrize(("n", "p"), [(n, Point()) for n in NUMBERS])
    def test_stacked(w, n, p): ...

    @pytest.mark.parametrize("name", [*KNOWN, *LATE, "x" * 101, Kind.ONE, re.compile("a+"), double])
    def test_names(name): ...

    @pytest.mark.parametrize("a, b", [*product("xy", [1.5])], ids=["first", None])
    def test_listed(a, b): ...

    PARAMS = [1, pytest.param(2, id="two"), pytest.param(3, marks=pytest.mark.skip)]

    @pytest.mark.parametrize("a", PARAMS, ids=lambda a: f"<{a}>")
    def test_called(a): ...

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("n", [1])
    def test_a_part_is_unknown(dtype, n): ...

    @pytest.mark.parametrize("dtype", SOME)
    @pytest.mark.parametrize("n", [1])
    def test_all_of_one_is_unknown(dtype, n): ...

    @pytest.mark.parametrize("n", ELSEWHERE)
    def test_nobody_knows(n): ...

    @pytest.fixture(params=[1, 2])
    def some(request): ...

    def test_by_a_fixture(some): ...

    @pytest.mark.parametrize("n", [1])
    class TestGroup:
        @pytest.mark.parametrize("m", [2])
        def test_inside(self, n, m): ...
"""
CASES = {
    "test_plain": {""},
    "test_stacked": {"2-p0-True", "2-p0-None", "4-p1-True", "4-p1-None", "9-p2-True", "9-p2-None"},
    "test_names": {"a b", "c", "1", "name3", "Kind.ONE", "a+", "double"},
    "test_listed": {"first", "y-1.5"},
    "test_called": {"<1>", "two", "<3>"},
    "TestGroup::test_inside": {"2-1"},
}
UNKNOWN = {
    "test_a_part_is_unknown": "1-torch.float64",
    "test_all_of_one_is_unknown": "1-dtype7",
    "test_nobody_knows": "7",
    "test_by_a_fixture": "2",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tables.py").write_text(TABLES)
    (tmp_path / "test_it.py").write_text(dedent(SOURCE))
    return tmp_path / "test_it.py"


def test_cases_are_those_of_pytest(file: Path) -> None:
    tests = declared_tests(file)
    assert set(tests) == {*CASES, *UNKNOWN}
    for name, known in CASES.items():
        pattern = tests[name].cases()
        assert all(pattern.fullmatch(case) for case in known), name
        others = {"", "z", "7", "2-p1-True"} - known
        assert not any(pattern.fullmatch(case) for case in others), name
    (file.parent / "torch.py").write_text("class float32:\n    is_floating_point = 1\n\nfloat64 = float32")
    (file.parent / "gone.py").write_text("ELSEWHERE = [7]")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(file)]
    out = subprocess.run(command, cwd=file.parent, capture_output=True, text=True).stdout
    collected = {line.partition("::")[2] for line in out.splitlines() if line.startswith("test_it.py::")}
    told = {f"{name}[{case}]" if case else name for name, known in CASES.items() for case in known}
    unknown = {name for name in collected if name.partition("[")[0] in UNKNOWN}
    assert collected - unknown == told, out


@pytest.mark.parametrize(("name", "case"), UNKNOWN.items())
def test_where_the_source_does_not_say_anything_may_stand(file: Path, name: str, case: str) -> None:
    assert declared_tests(file)[name].cases().fullmatch(case)


def test_what_is_known_of_a_name_is_asked_for_beside_what_is_not(file: Path) -> None:
    assert not declared_tests(file)["test_a_part_is_unknown"].cases().fullmatch("2-torch.float64")


def test_stale_names_of_the_long_part_are_found(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    file.rename(tmp_path / "tests" / "test_it.py")
    (tmp_path / "tables.py").rename(tmp_path / "tests" / "tables.py")
    (tmp_path / "list.txt").write_text(
        "test_it.py::test_plain\n"
        "test_it.py::test_gone\n"
        "test_none.py::test_plain\n"
        "test_it.py::test_stacked  only  [2-p0-True]  [2-p1-True]\n"
        "test_it.py::test_nobody_knows  but  [7]\n"
        "test_it.py::TestGroup::test_inside  but  [2-1]  [1-2]\n"
        "test_it.py::test_names  eighth\n"
    )
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "LONG_PART", tmp_path / "list.txt")
    assert list(house.stale_names_in_the_long_part({})) == [
        "list.txt: nobody has tests/test_it.py::test_gone",
        "list.txt: nobody has tests/test_none.py::test_plain",
        "list.txt: tests/test_it.py::test_stacked has no case [2-p1-True]",
        "list.txt: tests/test_it.py::TestGroup::test_inside has no case [1-2]",
    ]
    assert LongPart((tmp_path / "list.txt").read_text()).cases
