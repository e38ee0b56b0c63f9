"""One value of a configuration: is it of its declared type, and how is it read from words of a command line.

Types are int, float, bool, str, `Literal`, tuples of one of these, unions, and tuples of dataclasses: in a
file such a list is a table for each, `[[section.key]]`. No value is bent to fit: 2.0
is no whole number and "2" no number, unless it was a word of a command line. Numbers are finite.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

SWITCH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Mismatch(Exception):
    """A value that its type does not allow; the text completes 'expected ...'."""


def expected_text(kind: Any) -> str:
    """A type in words: 'a whole number or "auto"'."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f'"{args[0]}"' if len(args) == 1 else "one of " + ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(expected_text(arg) for arg in args)
    if origin is tuple and dataclasses.is_dataclass(args[0]):
        return "tables, one for each, in a configuration file"
    if origin is tuple:
        return "a list of " + {str: "texts", int: "whole numbers", float: "numbers"}.get(args[0], "values")
    if dataclasses.is_dataclass(kind):
        return "a table"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names[types.NoneType] = "nothing"
    if kind not in names:
        raise TypeError(f"a configuration cannot hold {kind}")
    return names[kind]


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return close[0] if close else None


def convert(value: Any, kind: Any) -> Any:
    """A TOML value as its declared type; raises Mismatch."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal and any(value == arg and type(value) is type(arg) for arg in args):
        return value
    if origin in (types.UnionType, typing.Union):
        for arg in args:
            try:
                return convert(value, arg)
            except Mismatch:
                continue
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(item, args[0]) for item in value)
    if dataclasses.is_dataclass(kind):
        return convert_table(value, kind)
    if kind in (int, bool, str, types.NoneType) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise Mismatch("a finite number")
        return float(value)
    raise Mismatch(expected_text(kind))


def convert_table(value: Any, kind: Any) -> Any:
    """One table of a list as its dataclass; raises Mismatch, which names the key."""
    if isinstance(value, kind):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(value, Mapping):
        raise Mismatch(f"a table with {', '.join(names)}")
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in names:
            close = nearest(str(name), names)
            hint = f"did you mean {close!r}?" if close else f"there are {', '.join(names)}"
            raise Mismatch(f"no key {name!r} in it; {hint}")
    given = {}
    for name, item in value.items():
        try:
            given[name] = convert(item, hints[name])
        except Mismatch as mismatch:
            raise Mismatch(f"{name} to be {mismatch}") from None
    return kind(**given)


def list_in(kind: Any) -> Any:
    """Of a union: the list that may stand in the place of one word (`moe.shadow`: auto, off, or numbers)."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union) or str in typing.get_args(kind):
        return None
    return next((arg for arg in typing.get_args(kind) if typing.get_origin(arg) is tuple), None)


def is_switch(kind: Any) -> bool:
    """Whether true and false are among its values (`run.deterministic`: auto, true or false)."""
    return kind is bool or bool in typing.get_args(kind)


def is_item(word: str, listed: Any) -> bool:
    """Whether a word can stand in a list."""
    try:
        read_words([word], listed)
    except Mismatch:
        return False
    return True


def read_words(words: Sequence[str], kind: Any) -> Any:
    """Words of a command line as a declared type; raises Mismatch."""
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if dataclasses.is_dataclass(item):
            raise Mismatch(expected_text(kind))
        return tuple(read_words([word], item) for word in words)
    listed = list_in(kind)
    if listed is not None and is_item(words[0], listed):
        return read_words(words, listed)
    if is_switch(kind) and words[0].lower() in SWITCH:
        return SWITCH[words[0].lower()]
    if kind is bool:
        raise Mismatch(expected_text(kind))
    expected = expected_text(kind)
    readers: tuple[Callable[[str], Any], ...] = (str, int, float)
    for read in readers:
        try:
            return convert(read(words[0]), kind)
        except Mismatch as mismatch:
            expected = str(mismatch)
        except ValueError:
            continue
    raise Mismatch(expected)


def mismatch_text(key: str, value: Any, kind: Any, mismatch: Mismatch) -> str:
    literals = [str(word) for part in (kind, *typing.get_args(kind)) for word in _literals(part)]
    close = nearest(str(value), literals)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"{key} = {value!r}: expected {mismatch}{hint}"


def _literals(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
