"""One change to a file of the package, and the test that must fail with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Mutant:
    file: str
    """Below src/moeclipse."""
    old: str
    """Stands exactly once in the file."""
    new: str
    test: str
    """Below tests, of the short suite; it must fail with the change, and passes without."""
    change: str
    """In words."""
    harm: str
    """What would go wrong for a user."""
    survived: bool = False
    """All tests of the module's file passed with it, until it was listed here with a test of its own."""

    @property
    def source(self) -> str:
        return (ROOT / "src" / "moeclipse" / self.file).read_text()

    @property
    def changed(self) -> str:
        return self.source.replace(self.old, self.new)
