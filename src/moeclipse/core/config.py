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
import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from moeclipse.core.errors import ConfigError
from moeclipse.core.renames import rename_note, renamed_in
from moeclipse.core.shown import warn
from moeclipse.core.toml import read_toml as read_toml
from moeclipse.core.toml import to_toml as to_toml
from moeclipse.core.values import (
    SWITCH,
    Mismatch,
    convert,
    expected_text,
    is_item,
    is_switch,
    list_in,
    mismatch_text,
    read_words,
)
from moeclipse.core.values import nearest as nearest

T = TypeVar("T")
HALF = re.compile("[\ud800-\udfff]")
"""Of a surrogate pair: so Python reads words whose bytes are not UTF-8, which no file of ours can hold."""


@dataclasses.dataclass(frozen=True)
class Sourced:
    """A value as it was given, and by whom (a file's name, or a flag)."""

    value: Any
    origin: str
    words: bool = False
    """The value is a list of words from a command line, not yet read as any type."""
    was: str = ""
    """The old name of the key, where that was used (`core/renames`)."""


ConfigLayer = Mapping[str, Sourced]
"""Dotted key -> what was given for it."""


@dataclasses.dataclass(frozen=True)
class Built(Generic[T]):
    """A configuration, and everything that is wrong with how it was given."""

    config: T
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What a user should know and need not mend."""

    def checked(self) -> T:
        if self.problems:
            raise ConfigError(self.problems)
        return self.config

    def with_warnings(self) -> T:
        """The checked configuration, for calls from Python: notes become warnings."""
        config = self.checked()
        for note in self.notes:
            warn(note, FutureWarning, stacklevel=3)
        return config


# --- what a configuration class looks like ---------------------------------------------------------------


@functools.cache
def _resolved(schema: typing.Hashable) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def hints_of(schema: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; finding them takes long, so they are kept."""
    return _resolved(schema)


@functools.cache
def _keys(schema: typing.Hashable) -> dict[str, Any]:
    hints = hints_of(schema)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found |= {f"{field.name}.{key}": sub for key, sub in keys_of(typing.cast(type, kind)).items()}
        else:
            found[field.name] = kind
    return found


def keys_of(schema: type) -> dict[str, Any]:
    """Dotted key -> type, for every value in a tree of dataclasses."""
    return dict(_keys(schema))


def problems_of(config: Any, prefix: str = "") -> Iterator[str]:
    """The problems of a tree: values of a wrong type, those of every section, then those between sections.

    A section with a value of a wrong type says no more: its own rules could not even be asked. `prefix` is
    what its keys begin with.
    """
    hints = hints_of(type(config))
    wrong = []
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if value is field.default:  # of its type: a test sees to it
            continue
        if dataclasses.is_dataclass(value):
            yield from problems_of(value, f"{key}.")
            continue
        try:
            convert(value, hints[field.name])
        except Mismatch as mismatch:
            wrong.append(mismatch_text(key, value, hints[field.name], mismatch))
    yield from wrong
    if not wrong and hasattr(config, "problems"):
        yield from config.problems()


def named_in(problem: str, keys: Iterable[str]) -> list[str]:
    """The keys that a problem speaks of."""
    likely = [key for key in keys if key in problem]
    return [key for key in likely if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", problem)]


def validate(config: T) -> T:
    """The config itself, or one ConfigError with everything that is wrong in it."""
    return Built(config, tuple(problems_of(config))).checked()


# --- keys and what is given for them ---------------------------------------------------------------------


def _take(key: str, given: Sourced, kind: Any) -> tuple[Any, str | None]:
    """(value, problem) of one given value."""
    try:
        return (read_words if given.words else convert)(given.value, kind), None
    except Mismatch as mismatch:
        shown = " ".join(given.value) if given.words else given.value
        return None, f"{mismatch_text(key, shown, kind, mismatch)} ({given.origin})"


def flag_of(key: str) -> str:
    """What sets a key on a command line."""
    return f"--{key.replace('_', '-')}"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """'gate.top_kk: unknown key; did you mean gate.top_k?'"""
    return f"{key}: unknown key; {_meant(key, list(known), str)}"


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """'--gate.top-kk: unknown flag; did you mean --gate.top-k?': files have keys, commands have flags."""
    return f"{flag}: unknown flag; {_meant(flag.lstrip('-').replace('-', '_'), list(known), flag_of)}"


def _meant(key: str, known: list[str], shown: Callable[[str], str]) -> str:
    sections = {name.rpartition(".")[0] for name in known} - {""}
    section, _, name = key.rpartition(".")
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    # Without a section, a letter that is missing is likelier than a section that is: --rank is --ranks.
    slip = None if section else nearest(key, siblings, cutoff=0.85)
    close = slip or (same_name[0] if same_name else nearest(key, siblings) or nearest(key, known))
    if close is None and name:
        # The section may be mistyped, forgotten or swapped: compare the last part alone.
        by_name = {other.rpartition(".")[2]: other for other in known}
        close = by_name.get(nearest(name, by_name) or "")
    if close:
        return f"did you mean {shown(close)}?"
    if section in sections:
        return f"{section} has {', '.join(other.rpartition('.')[2] for other in siblings)}"
    if sections:
        return f"the sections are {', '.join(sorted(sections))}"
    what = "keys" if shown is str else "flags"
    return f"the {what} are {', '.join(map(shown, sorted(known)))}" if known else "there are none"


# --- layers ----------------------------------------------------------------------------------------------


def table_layer(schema: type, table: Mapping[str, Any], origin: str) -> tuple[dict[str, Sourced], list[str]]:
    """A nested table as a layer, and what in it belongs to no key."""
    known, renamed = keys_of(schema), renamed_in(schema)
    layer: dict[str, Sourced] = {}
    problems: list[str] = []

    def visit(part: Mapping[str, Any], prefix: str) -> None:
        for name, value in part.items():
            key = f"{prefix}{name}"
            inside = [other for other in (*known, *renamed) if other.startswith(f"{key}.")]
            if key in known:
                _give(layer, key, Sourced(value, origin), problems)
            elif key in renamed:
                _give(layer, renamed[key], Sourced(value, origin, was=key), problems)
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


def _give(layer: dict[str, Sourced], key: str, given: Sourced, problems: list[str]) -> None:
    """Into a layer, unless it is there under another name."""
    there = layer.get(key)
    if there is not None and there.was != given.was:
        old = there.was or given.was
        problems.append(f"{old} is the old name of {key}; give only one of them ({given.origin})")
    else:
        layer[key] = given


def flag_layer(
    schema: type, words: Sequence[str], positional: str = ""
) -> tuple[dict[str, Sourced], list[str]]:
    """A command line (`--gate.top-k 2`, `--gate.top_k=2`, `--data.no-shuffle`) as a layer, and its problems.

    A list takes all words up to the next flag; a boolean may stand alone. One word that belongs to no flag
    is given to the key `positional`.
    """
    known, renamed = keys_of(schema), renamed_in(schema)
    kinds = known | {old: known[new] for old, new in renamed.items()}
    layer: dict[str, Sourced] = {}
    problems: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            key = word.lstrip("-").partition("=")[0].replace("-", "_")
            if word.startswith("-") and key in kinds:
                problems.append(f"{word}: unexpected; did you mean -{word}?")
                while rest and not rest[0].startswith("-") and "=" not in word:
                    rest.pop(0)  # its values are no file
            elif positional and positional not in layer and not word.startswith("-"):
                layer[positional] = Sourced([word], "command line", words=True)
            else:
                problems.append(f"{word}: unexpected; flags are given as --name value")
            continue
        flag, has_value, value = word.partition("=")
        key = flag[2:].replace("-", "_")
        values = [value] if has_value else []
        section, _, name = key.rpartition(".")
        positive = f"{section}.{name[3:]}" if section else name[3:]
        if key not in kinds and name.startswith("no_") and is_switch(kinds.get(positive)) and not has_value:
            key, values = positive, ["false"]
        while rest and not rest[0].startswith("--") and _wants_more(kinds.get(key), values, rest[0]):
            values.append(rest.pop(0))
        if key not in kinds:
            problems.append(unknown_flag(flag, known))
            while rest and not rest[0].startswith("-"):
                rest.pop(0)  # its values are no mistake of their own
            continue
        if not values and is_switch(kinds[key]):
            values = ["true"]
        if any(map(HALF.search, values)):
            problems.append(f"{key}: what stands behind {flag} is not UTF-8 text")
        elif values or typing.get_origin(kinds[key]) is tuple:
            given = Sourced(values, flag, words=True, was=key if key in renamed else "")
            _give(layer, renamed.get(key, key), given, problems)
        else:
            problems.append(f"{key}: expected {expected_text(kinds[key])} after {flag}")
    return layer, problems


def _wants_more(kind: Any, values: Sequence[str], word: str) -> bool:
    if typing.get_origin(kind) is tuple:
        return True
    listed = list_in(kind)
    if values and listed is not None:
        return is_item(values[0], listed) and is_item(word, listed)
    if is_switch(kind):
        return not values and (word.lower() in SWITCH or is_item(word, kind))
    return not values


# --- putting it together ---------------------------------------------------------------------------------


def build(schema: type[T], layers: Sequence[ConfigLayer], problems: Iterable[str] = ()) -> Built[T]:
    """The configuration that layers give, later ones winning, with all problems of values and sections."""
    found = list(problems)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    unread: set[str] = set()
    notes: list[str] = []
    known = keys_of(schema)
    for layer in layers:
        for key, given in layer.items():
            if given.was:
                notes.append(rename_note(given.was, key, given.origin))
            value, problem = _take(given.was or key, given, known[key])
            if problem is None:
                values[key], origins[key] = value, given.origin
                unread.discard(key)
            else:
                found.append(problem)
                unread.add(key)
    config = _assemble(schema, values)
    for problem in problems_of(config):
        named = named_in(problem, known)
        if not unread.intersection(named):
            places = [f"{key} from {origins[key]}" for key in named if key in origins]
            if len(named) == 1 and places:
                places = [origins[named[0]]]
            found.append(f"{problem} ({', '.join(places)})" if places else problem)
    return Built(config, tuple(dict.fromkeys(found)), tuple(notes))


def _assemble(schema: type[T], values: Mapping[str, Any]) -> T:
    hints = hints_of(schema)
    arguments: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, dot, rest = key.partition(".")
        if dot:
            inside.setdefault(section, {})[rest] = value
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _assemble(hints[field.name], inside.get(field.name, {}))
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return schema(**arguments)


def from_table(schema: type[T], table: Mapping[str, Any], origin: str) -> T:
    """A configuration from a nested table alone, checked."""
    layer, problems = table_layer(schema, table, origin)
    return build(schema, [layer], problems).with_warnings()


def with_values(config: T, values: Mapping[str, Any]) -> T:
    """A copy in which dotted keys have other values (already of their type); unknown keys are refused.

    A configuration may have more to say about some values: what its `values_beneath` answers stands below
    those that are given here, and above those that it has.
    """
    flat, renamed, problems = to_flat(config), renamed_in(type(config)), []
    beneath: Any = getattr(config, "values_beneath", None)
    flat |= {} if beneath is None else beneath(values)
    for name, value in values.items():
        key = renamed.get(name, name)
        if key != name:
            warn(rename_note(name, key, "with_values"), FutureWarning)
        if key not in flat:
            problems.append(unknown_key(key, flat))
        flat[key] = value
    if problems:
        raise ConfigError(problems)
    return _assemble(type(config), flat)


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
