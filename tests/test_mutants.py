"""The list of mutants fits the source and the short suite; in full, each of them is noticed."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from mutants_of import MUTANTS
from mutants_of.mutant import ROOT, Mutant
from selection import LONG_PART, LongPart

LONG = LongPart(LONG_PART.read_text())
FEWEST, FEWEST_OF_A_ROOM = 120, 8


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / "tests" / file).read_text())


def is_full(marks: list[ast.expr]) -> bool:
    return any(ast.unparse(mark) == "pytest.mark.full" for mark in marks)


def short_tests(tree: ast.Module) -> list[str]:
    """Names of the tests of a file that the short suite runs."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            if is_full(marks):
                return []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if not is_full(node.decorator_list)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file} {m.test.split('::')[1]}")
def test_a_mutant_fits(mutant: Mutant) -> None:
    assert mutant.source.count(mutant.old) == 1, "the code has changed: let the mutant follow it"
    ast.parse(mutant.changed)
    file, name = mutant.test.split("::")
    assert name in short_tests(parsed(file)), "the short suite has no such test"
    assert not LONG.holds_all_of(f"tests/{mutant.test}"), "it is left to the long part"
    assert mutant.change
    assert mutant.harm, "docs/list_mutants.py prints of each what would go wrong"


def test_a_test_that_the_short_suite_leaves_out_is_known() -> None:
    mark, test = "@pytest.mark.full\n", "def test_one(): ...\n"
    assert short_tests(ast.parse(test)) == ["test_one"]
    assert short_tests(ast.parse(mark + test)) == []
    assert short_tests(ast.parse("@pytest.mark.parametrize('n', [1])\n" + mark + test)) == []
    assert short_tests(ast.parse("pytestmark = pytest.mark.full\n" + test)) == []
    assert short_tests(ast.parse("pytestmark = [pytest.mark.gpu, pytest.mark.full]\n" + test)) == []
    assert short_tests(ast.parse("pytestmark = [pytest.mark.gpu]\n" + test)) == ["test_one"]


def test_every_room_has_its_share_and_none_is_listed_twice() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "moeclipse").glob("*/__init__.py")}
    listed = Counter(mutant.file.split("/")[0] for mutant in MUTANTS)
    assert set(listed) == rooms
    assert {room: number for room, number in listed.items() if number < FEWEST_OF_A_ROOM} == {}
    assert len(MUTANTS) >= FEWEST
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_all_are_printed_or_those_with_a_word() -> None:
    mutant_list = runpy.run_path(str(ROOT / "docs" / "list_mutants.py"))["mutant_list"]
    rows = mutant_list().splitlines()[2:]
    assert len(rows) == len(MUTANTS)
    assert {row.count(" | ") for row in rows} == {3}
    some = mutant_list("checkpoint").splitlines()[2:]
    assert 0 < len(some) < len(rows)
    assert set(some) < set(rows)


HARMLESS = """
import sys
sys.path.insert(0, "tests")
import mutants
from mutants_of.mutant import Mutant
line = "from dataclasses import dataclass"
for test in (
    "balance/test_load.py::test_averages_refuse_nonsense",
    "moe/test_layer.py::test_an_expert_without_rows_has_a_zero_gradient",
):
    harmless = Mutant("balance/split.py", line, line + " ", test, "a space", "nothing")
    _, noticed, said = mutants.is_noticed(harmless)
    assert "1 passed" in said and "NOT_TESTED" not in said, said
    assert not noticed
"""


@pytest.mark.full
@pytest.mark.parametrize("call", [["-c", HARMLESS], ["tests/mutants.py"]], ids=["harmless", "all"])
def test_every_mutant_is_noticed_and_a_harmless_change_is_not(call: list[str]) -> None:
    done = subprocess.run([sys.executable, *call], cwd=ROOT, capture_output=True, text=True)
    others = [line for line in done.stdout.splitlines() if not line.startswith("noticed")]
    assert done.returncode == 0, "\n".join([*others, done.stderr])  # hundreds of others were noticed
