"""Text that every machine has: the sources of Python's standard library, for runs that name no data."""

from __future__ import annotations

import os
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")


def standard_library(root: Path) -> list[Path]:
    """Source files of the standard library at `root`, in an order that no file system changes."""
    files: list[str] = []
    for folder, folders, names in os.walk(root):
        # Not looked into: what is installed there can be a hundred times as much.
        folders[:] = [name for name in folders if name not in INSTALLED]
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted((Path(name) for name in files if os.path.isfile(name)), key=Path.as_posix)
