"""Keys that have another name now: old files, flags and checkpoints are still read.

The root of a configuration tree lists them in `RENAMED`, old dotted key -> present one:

    RENAMED: ClassVar[Mapping[str, str]] = {"gate.experts": "gate.top_k"}

Contract: what is given under an old name counts as given under the new one, and a note says both names. An
old name never becomes the name of something else, and its target is a key of today: a chain of renames is
written as several lines with one target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def renamed_in(schema: type) -> Mapping[str, str]:
    """Old dotted key -> present one."""
    return getattr(schema, "RENAMED", {})


def rename_note(old: str, new: str, origin: str) -> str:
    return f"{old} is now called {new}; the old name still works ({origin})"


def with_new_names(schema: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """A nested table, such as a checkpoint stored of a configuration, with the present name of every key."""
    renamed = renamed_in(schema)
    found: dict[str, Any] = {}

    def visit(part: Mapping[str, Any], prefix: str) -> None:
        for name, value in part.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and key not in renamed:
                _place(found, key)
                visit(value, f"{key}.")
            else:
                *sections, last = renamed.get(key, key).split(".")
                _place(found, ".".join(sections)).setdefault(last, value)

    visit(table, "")
    return found


def _place(tree: dict[str, Any], section: str) -> dict[str, Any]:
    """The table of a dotted section, made where it is not there."""
    for name in filter(None, section.split(".")):
        tree = tree.setdefault(name, {})
    return tree
