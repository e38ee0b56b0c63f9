"""What each file is for: the first sentence of its docstring, room by room.

    python docs/list_files.py                    all of them
    python docs/list_files.py moe/exchange sim   those of some rooms

The site has it as a page (docs/site_pages.py). It is written down nowhere, so it is as true as the files
are about themselves.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "moeclipse"
ROOMS = (
    *("core", "cost", "schedule", "balance", "sim", "plan", "report"),
    *("ops", "comm", "tensor", "moe", "pipeline", "model", "hf", "train", "cli", "testing"),
)
"""In the order in which they build on each other."""


def first_words(path: Path) -> str:
    """The first sentence."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(doc.split("\n\n")[0].split())
    return line.split(". ")[0].rstrip(".:")


def file_list(*wanted: str) -> str:
    """All rooms, or those that are named, each with what is inside it."""
    lines: list[str] = []
    for room in ROOMS:
        for folder in (SOURCE / room, *sorted(path.parent for path in (SOURCE / room).glob("*/__init__.py"))):
            name = folder.relative_to(SOURCE).as_posix()
            if wanted and not {name, room} & {word.strip("/") for word in wanted}:
                continue
            lines += ["", f"**{name}/** {first_words(folder / '__init__.py')}", ""]
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            lines += [f"- `{path.stem}` {first_words(path)}" for path in files]
    return "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":
    print(file_list(*sys.argv[1:]), end="")
