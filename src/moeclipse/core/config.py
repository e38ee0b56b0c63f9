"""Trees of frozen dataclasses from TOML tables and command-line flags (`core/toml` writes them back).

Idea: a configuration is a stack of layers (preset, file, flags). A layer maps dotted keys such as
`gate.top_k` to what was given and where; the last layer that gives a key wins, and what nobody gives keeps
the default of its dataclass.

Contract: nothing here stops at the first fault. Unknown keys, wrong types and values outside a `Literal` are
collected together with what the sections themselves report through `problems()`, and `Built.checked` raises
one ConfigError with all of it. Every problem names its key, where it came from, what was expected and, for
a typo, the nearest key or value.

Hazard: a value that could not be read falls back to the layer below, so that the rest can still be checked;
a section's complaint about such a key would then speak of a value that nobody gave, and is left out.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from moeclipse.core.errors import ConfigError
from moeclipse.core.toml import read_toml as read_toml
from moeclipse.core.toml import to_toml as to_toml

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Given:
    """A value as it was given, and by whom (a file's name, or a flag)."""

    value: Any
    origin: str
    words: bool = False
    """The value is a list of words from a command line, not yet read as any type."""


Layer = Mapping[str, Given]
"""Dotted key -> what was given for it."""


@dataclasses.dataclass(frozen=True)
class Built(Generic[T]):
    """A configuration, and everything that is wrong with how it was given."""

    config: T
    problems: tuple[str, ...]

    def checked(self) -> T:
        if self.problems:
            raise ConfigError(self.problems)
        return self.config


# --- what a configuration class looks like ---------------------------------------------------------------


def keys_of(schema: type) -> dict[str, Any]:
    """Dotted key -> type, for every value in a tree of dataclasses."""
    hints = typing.get_type_hints(schema)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found |= {f"{field.name}.{key}": sub for key, sub in keys_of(typing.cast(type, kind)).items()}
        else:
            found[field.name] = kind
    return found


def problems_of(config: Any) -> Iterator[str]:
    """The problems of a tree: those of every section, then those between sections."""
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        if dataclasses.is_dataclass(section):
            yield from problems_of(section)
    if hasattr(config, "problems"):
        yield from config.problems()


def validate(config: T) -> T:
    """The config itself, or one ConfigError with everything that is wrong in it."""
    return Built(config, tuple(problems_of(config))).checked()


# --- reading values --------------------------------------------------------------------------------------


class _Mismatch(Exception):
    """A value that its type does not allow; the text completes 'expected ...'."""


def expected_text(kind: Any) -> str:
    """A type in words: 'a whole number or "auto"'."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f'"{args[0]}"' if len(args) == 1 else "one of " + ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(expected_text(arg) for arg in args)
    if origin is tuple:
        return "a list of " + {str: "texts", int: "whole numbers", float: "numbers"}.get(args[0], "values")
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if kind not in names:
        raise TypeError(f"a configuration cannot hold {kind}")
    return names[kind]


def nearest(word: str, choices: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return close[0] if close else None


def convert(value: Any, kind: Any) -> Any:
    """A TOML value as its declared type; raises _Mismatch."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal and any(value == arg and type(value) is type(arg) for arg in args):
        return value
    if origin in (types.UnionType, typing.Union):
        for arg in args:
            try:
                return convert(value, arg)
            except _Mismatch:
                continue
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(item, args[0]) for item in value)
    if kind in (int, bool, str) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise _Mismatch("a finite number")
        return float(value)
    raise _Mismatch(expected_text(kind))


def read_words(words: Sequence[str], kind: Any) -> Any:
    """Words of a command line as a declared type; raises _Mismatch."""
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return tuple(read_words([word], item) for word in words)
    if kind is bool:
        switch = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if words[0].lower() not in switch:
            raise _Mismatch(expected_text(kind))
        return switch[words[0].lower()]
    expected = expected_text(kind)
    readers: tuple[Callable[[str], Any], ...] = (str, int, float)
    for read in readers:
        try:
            return convert(read(words[0]), kind)
        except _Mismatch as mismatch:
            expected = str(mismatch)
        except ValueError:
            continue
    raise _Mismatch(expected)


def _take(key: str, given: Given, kind: Any) -> tuple[Any, str | None]:
    """(value, problem) of one given value."""
    try:
        return (read_words if given.words else convert)(given.value, kind), None
    except _Mismatch as mismatch:
        shown = " ".join(given.value) if given.words else given.value
        text = f"{key} = {shown!r}: expected {mismatch}"
        literals = [str(word) for part in (kind, *typing.get_args(kind)) for word in _literals(part)]
        close = nearest(str(shown), literals)
        hint = f"; did you mean {close!r}?" if close else ""
        return None, f"{text}{hint} ({given.origin})"


def _literals(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def unknown_key(key: str, known: Iterable[str]) -> str:
    """'gate.top_kk: unknown key; did you mean gate.top_k?'"""
    known = list(known)
    sections = {name.rpartition(".")[0] for name in known} - {""}
    section, _, name = key.rpartition(".")
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    close = same_name[0] if same_name else nearest(key, siblings) or nearest(key, known)
    if close is None and name:
        # The section may be mistyped, forgotten or swapped: compare the last part alone.
        by_name = {other.rpartition(".")[2]: other for other in known}
        close = by_name.get(nearest(name, by_name) or "")
    if close:
        return f"{key}: unknown key; did you mean {close}?"
    if section in sections:
        keys = ", ".join(other.rpartition(".")[2] for other in siblings)
        return f"{key}: unknown key; {section} has {keys}"
    return f"{key}: unknown key; the sections are {', '.join(sorted(sections))}"


# --- layers ----------------------------------------------------------------------------------------------


def table_layer(schema: type, table: Mapping[str, Any], origin: str) -> tuple[dict[str, Given], list[str]]:
    """A nested table as a layer, and what in it belongs to no key."""
    known = keys_of(schema)
    layer: dict[str, Given] = {}
    problems: list[str] = []

    def visit(part: Mapping[str, Any], prefix: str) -> None:
        for name, value in part.items():
            key = f"{prefix}{name}"
            inside = [other for other in known if other.startswith(f"{key}.")]
            if key in known:
                layer[key] = Given(value, origin)
            elif inside and isinstance(value, Mapping):
                visit(value, f"{key}.")
            elif inside:
                names = ", ".join(other.removeprefix(f"{key}.") for other in inside)
                problems.append(f"{key} = {value!r}: expected a table [{key}] with {names} ({origin})")
            elif isinstance(value, Mapping):
                close = nearest(key, {other.rpartition(".")[0] for other in known} - {""})
                sections = sorted({other.partition(".")[0] for other in known if "." in other})
                hint = f"did you mean [{close}]?" if close else f"the sections are {', '.join(sections)}"
                problems.append(f"[{key}]: unknown section; {hint} ({origin})")
            else:
                problems.append(f"{unknown_key(key, known)} ({origin})")

    visit(table, "")
    return layer, problems


def flag_layer(
    schema: type, words: Sequence[str], positional: str = ""
) -> tuple[dict[str, Given], list[str]]:
    """A command line (`--gate.top-k 2`, `--gate.top_k=2`, `--data.no-shuffle`) as a layer, and its problems.

    A list takes all words up to the next flag; a boolean may stand alone. One word that belongs to no flag
    is given to the key `positional`.
    """
    known = keys_of(schema)
    layer: dict[str, Given] = {}
    problems: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if positional and positional not in layer and not word.startswith("-"):
                layer[positional] = Given([word], "command line", words=True)
            else:
                problems.append(f"{word}: unexpected; settings are given as --section.key value")
            continue
        flag, has_value, value = word.partition("=")
        key = flag[2:].replace("-", "_")
        values = [value] if has_value else []
        section, _, name = key.rpartition(".")
        positive = f"{section}.{name[3:]}" if section else name[3:]
        if key not in known and name.startswith("no_") and known.get(positive) is bool and not has_value:
            key, values = positive, ["false"]
        while rest and not rest[0].startswith("--") and _wants_more(known.get(key), values, rest[0]):
            values.append(rest.pop(0))
        if key not in known:
            problems.append(f"{unknown_key(key, known)} ({flag})")
        elif values or typing.get_origin(known[key]) is tuple:
            layer[key] = Given(values, flag, words=True)
        elif known[key] is bool:
            layer[key] = Given(["true"], flag, words=True)
        else:
            problems.append(f"{key}: expected {expected_text(known[key])} after {flag}")
    return layer, problems


def _wants_more(kind: Any, values: Sequence[str], word: str) -> bool:
    if typing.get_origin(kind) is tuple:
        return True
    if kind is bool:
        return not values and word.lower() in ("true", "false", "1", "0", "yes", "no")
    return not values


# --- putting it together ---------------------------------------------------------------------------------


def build(schema: type[T], layers: Sequence[Layer], problems: Iterable[str] = ()) -> Built[T]:
    """The configuration that layers give, later ones winning, with all problems of values and sections."""
    found = list(problems)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    unread: set[str] = set()
    known = keys_of(schema)
    for layer in layers:
        for key, given in layer.items():
            value, problem = _take(key, given, known[key])
            if problem is None:
                values[key], origins[key] = value, given.origin
                unread.discard(key)
            else:
                found.append(problem)
                unread.add(key)
    config = _assemble(schema, values)
    for problem in problems_of(config):
        named = [key for key in known if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", problem)]
        if not unread.intersection(named):
            places = [f"{key} from {origins[key]}" for key in named if key in origins]
            if len(named) == 1 and places:
                places = [origins[named[0]]]
            found.append(f"{problem} ({', '.join(places)})" if places else problem)
    return Built(config, tuple(dict.fromkeys(found)))


def _assemble(schema: type[T], values: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(schema)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            start = f"{field.name}."
            inside = {key[len(start) :]: value for key, value in values.items() if key.startswith(start)}
            arguments[field.name] = _assemble(hints[field.name], inside)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return schema(**arguments)


def from_table(schema: type[T], table: Mapping[str, Any], origin: str) -> T:
    """A configuration from a nested table alone, checked."""
    layer, problems = table_layer(schema, table, origin)
    return build(schema, [layer], problems).checked()


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """A copy in which dotted keys have other values (already of their type)."""
    return _assemble(type(config), to_flat(config) | dict(values))


def to_flat(config: Any) -> dict[str, Any]:
    """Dotted key -> value."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= {f"{field.name}.{key}": item for key, item in to_flat(value).items()}
        else:
            flat[field.name] = value
    return flat
