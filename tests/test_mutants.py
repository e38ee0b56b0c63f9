"""The list of mutants fits the source and the page that explains it; in full, each of them is noticed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file} {m.test.split('::')[1]}")
def test_a_mutant_fits(mutant: Mutant) -> None:
    assert mutant.source.count(mutant.old) == 1, "the code has changed: let the mutant follow it"
    ast.parse(mutant.changed)
    file, name = mutant.test.split("::")
    body = ast.parse((ROOT / "tests" / file).read_text()).body
    assert name in [node.name for node in body if isinstance(node, ast.FunctionDef)]
    assert f"`{name}`" in PAGE, "docs/testing.md says of each mutant what would go wrong"


def test_every_row_of_the_page_is_a_mutant() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and "`test_" in line]
    listed = sorted((row.split("`")[1], row.split("`")[-2]) for row in rows)
    assert listed == sorted((m.file, m.test.split("::")[1]) for m in MUTANTS)


HARMLESS = """
import sys
sys.path.insert(0, "tests")
import mutants
line = "from dataclasses import dataclass"
harmless = mutants.Mutant(
    "balance/quota.py", line, line + " ", "balance/test_load.py::test_averages_refuse_nonsense"
)
_, noticed, said = mutants.is_noticed(harmless)
assert "1 passed" in said and "NOT_TESTED" not in said, said
assert not noticed
"""


@pytest.mark.full
@pytest.mark.parametrize("call", [["-c", HARMLESS], ["tests/mutants.py"]], ids=["harmless", "all"])
def test_every_mutant_is_noticed_and_a_harmless_change_is_not(call: list[str]) -> None:
    done = subprocess.run([sys.executable, *call], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
