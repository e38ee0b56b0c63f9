"""Write the list of files in docs/design.md: of each file the first sentence of its docstring.

    python docs/list_files.py

A test writes it again and compares, so the list is as true as the files are about themselves.
"""

from __future__ import annotations

import ast
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "moeclipse"
PAGE = DOCS / "design.md"
ROOMS = (
    *("core", "cost", "schedule", "balance", "sim", "plan", "report"),
    *("ops", "comm", "tensor", "moe", "pipeline", "model", "hf", "train", "cli", "testing"),
)
"""In the order in which they build on each other."""
BEGIN, END = "<!-- files -->\n", "<!-- end of files -->\n"


def first_words(path: Path) -> str:
    """The first sentence."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(doc.split("\n\n")[0].split())
    return line.split(". ")[0].rstrip(".:")


def file_list() -> str:
    lines: list[str] = []
    for room in ROOMS:
        for folder in (SOURCE / room, *sorted(path.parent for path in (SOURCE / room).glob("*/__init__.py"))):
            name = folder.relative_to(SOURCE).as_posix()
            lines += ["", f"**{name}/** {first_words(folder / '__init__.py')}", ""]
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            lines += [f"- `{path.stem}` {first_words(path)}" for path in files]
    return "\n".join(lines) + "\n\n"


def with_files(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + file_list() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_files(PAGE.read_text()))
