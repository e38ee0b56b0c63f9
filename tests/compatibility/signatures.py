"""How a callable is called, as data, and what a later version must not change about it.

describe(function)        [[name, kind, default], ...]; kinds: "both" (by place or name), "name", "place",
                          "*", "**"; the default in the spelling of Python, None where there is none
breaks(old, new)          sentences; empty where every call that worked still works and means the same
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "place",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "both",
    inspect.Parameter.KEYWORD_ONLY: "name",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
Described = list[list[Any]]


def resolve(spec: str) -> Any:
    """`moeclipse:Mesh.of_world`."""
    module, _, path = spec.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def describe(function: Callable[..., Any]) -> Described:
    rows = []
    for parameter in inspect.signature(function).parameters.values():
        default = None if parameter.default is parameter.empty else _spelled(parameter.default)
        rows.append([parameter.name, KINDS[parameter.kind], default])
    return rows


def _spelled(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return repr(value) if plain else f"<{type(value).__name__}>"


def breaks(old: Described, new: Described) -> list[str]:
    found = []
    places = [name for name, kind, _ in new if kind in ("both", "place")]
    names = {name: (kind, default) for name, kind, default in new}
    for place, (name, kind, default) in enumerate(old):
        if name not in names:
            found.append(f"{name} is gone")
            continue
        now, default_now = names[name]
        by_place, by_name = kind in ("both", "place"), kind in ("both", "name")
        if by_place and places[place : place + 1] != [name]:
            found.append(f"{name} is no longer argument {place + 1}")
        if by_name and now not in ("both", "name"):
            found.append(f"{name} can no longer be given by name")
        if default != default_now:
            found.append(f"{name} was {default} where it is left out, and is {default_now}")
    known = {name for name, *_ in old}
    found += [
        f"{name} must be given, which nobody knew"
        for name, kind, default in new
        if name not in known and default is None and kind not in ("*", "**")
    ]
    return found
