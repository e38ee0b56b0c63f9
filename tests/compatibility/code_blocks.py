"""The Python in README and docs: fenced blocks."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
UNFENCED = re.compile(r"^    (?:from moeclipse[\w.]* import .*|import moeclipse.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    file: str
    """Path below the root."""
    number: int
    """Among the Python blocks of the file, from 0."""
    source: str

    @property
    def name(self) -> str:
        return f"{self.file}#{self.number}"


def blocks_in(path: Path, root: Path = ROOT) -> list[Block]:
    file = path.relative_to(root).as_posix()
    found = FENCED.finditer(path.read_text())
    return [Block(file, number, match.group(1)) for number, match in enumerate(found)]


def unfenced_in(path: Path) -> list[str]:
    """Imports in indented text, where no test would see them."""
    return UNFENCED.findall(FENCED.sub("", path.read_text()))


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def all_blocks(root: Path = ROOT) -> list[Block]:
    return [block for page in pages(root) for block in blocks_in(page, root)]


def imports_of(source: str) -> list[tuple[str, str]]:
    """(module, name) of all that a block takes from moeclipse; `moeclipse.Name` counts, too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "moeclipse":
            found += [(str(node.module), alias.name) for alias in node.names]
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "moeclipse"
        ):
            found.append(("moeclipse", node.attr))
    return sorted(set(found))
