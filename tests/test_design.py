"""docs/design.md is true: every file says what it is for, and the walks never turn back."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moeclipse"
PAGE = (ROOT / "docs" / "design.md").read_text()


def test_every_file_says_what_it_is_for() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "list_files.py"))
    files = {path for path in SOURCE.rglob("*.py") if path.parent != SOURCE}
    assert set(made["ROOMS"]) == {path.relative_to(SOURCE).parts[0] for path in files}
    told = re.findall(r"^(?:- `\w+`|\*\*[\w/]+/\*\*) (\S.*)$", made["file_list"](), re.MULTILINE)
    assert len(told) == len(files), "a file without a first sentence, or in a room that nobody lists"
    assert made["file_list"]("sim").startswith("**sim/** ")
    assert "**moe" not in made["file_list"]("sim")


def walk(title: str) -> list[str]:
    """The files of a numbered list, in order."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([a-z_/]+\.py)`", section, flags=re.MULTILINE)


def named_by(path: Path) -> set[str]:
    """Files that a file imports, as the walk writes them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moeclipse."):
            module = (node.module or "").removeprefix("moeclipse.").replace(".", "/")
            found |= {f"{module}.py", *(f"{module}/{alias.name}.py" for alias in node.names)}
    return found


@pytest.mark.parametrize("title", ["A row's walk", "An op's walk"])
def test_a_walk_visits_each_file_once_and_finds_each_from_one_before(title: str) -> None:
    files = walk(title)
    assert len(files) > 9
    assert len(set(files)) == len(files), "a file is visited twice"
    known: set[str] = {files[0]}
    for file in files:
        assert file in known, f"nothing on the way to {file} imports it"
        known |= named_by(SOURCE / file)


def test_the_way_of_a_row_is_as_short_as_the_page_says() -> None:
    """Counted anew: functions entered, files, and changes of file of one forward."""
    counted = runpy.run_path(str(ROOT / "docs" / "walk.py"))
    for name, title in (("one rank", "one rank"), ("blocking", "ep 2, blocking"), ("smart", "ep 2, smart")):
        way = counted["Walk"](counted["steps_of"](name))
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {title} |"))
        calls, files, changes = (int(word.replace(",", "")) for word in line.split("|")[2:5])
        assert (way.files, len(way.changes)) == (files, changes), f"{line}: now {way}"
        assert abs(len(way.steps) - calls) <= calls // 10, "comprehensions may be functions"
