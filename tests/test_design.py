"""docs/design.md is true: its list of files is that of today, and its walks never turn back."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moeclipse"
PAGE = (ROOT / "docs" / "design.md").read_text()


def test_the_list_of_files_is_that_of_today() -> None:
    assert runpy.run_path(str(ROOT / "docs" / "list_files.py"))["with_files"](PAGE) == PAGE, (
        "run: python docs/list_files.py"
    )


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
