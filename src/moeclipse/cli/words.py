"""One parser for all commands: words of a command line as a dataclass, and the same dataclass as help.

    usage: moeclipse COMMAND ... [options]

    What the command does.

      RUN              a positional argument
      --flag N         what it is for (its default)

Idea. A field is a flag: its type says what may follow, the string below it what it is for. `train` has its
own layers of presets and files, and reads flags by the same rules (`core/config`, `cli/train_help`). A flag
of several values takes all words up to the next flag, or, in a command with a list of its own, one each time.

Contract. All mistakes are told at once, as one ConfigError, whose exit status is 2; nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from moeclipse.core.config import hints_of, unknown_flag
from moeclipse.core.errors import ConfigError
from moeclipse.core.program import command as pasted
from moeclipse.core.toml import docs_of
from moeclipse.core.values import Mismatch, is_switch, mismatch_text, read_words

T = TypeVar("T")
HELP = ("-h", "--help")
WIDTH = 108


@dataclasses.dataclass(frozen=True)
class Flag:
    """One field of a command's dataclass."""

    name: str
    kind: Any
    """Its type, without None."""
    default: Any
    doc: str

    @property
    def text(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def many(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def wants(self) -> str:
        """What stands behind it in help."""
        return "" if self.kind is bool else placeholder(self.kind)

    def read(self, words: Sequence[str]) -> Any:
        inner = typing.get_args(self.kind)[0] if self.many else self.kind
        if inner is not Path:
            return read_words(words, self.kind)
        return tuple(map(Path, words)) if self.many else Path(words[0])


def flags_of(schema: type) -> dict[str, Flag]:
    """By the name of the field."""
    hints, docs, found = hints_of(schema), docs_of(schema), {}
    for field in dataclasses.fields(schema):
        kind, doc = without_none(hints[field.name]), docs.get(field.name, "")
        found[field.name] = Flag(field.name, kind, field.default, doc)
    return found


def placeholder(kind: Any) -> str:
    """What may stand behind a flag of this type: N, PATH, cpu|cuda, NAME ..."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return "|".join(placeholder(arg) for arg in args if arg is not types.NoneType)
    if origin is tuple:
        return f"{placeholder(args[0])} ..."
    return {int: "N", float: "X", Path: "PATH", bool: "true|false"}.get(kind, "NAME")


def without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        rest = [part for part in typing.get_args(kind) if part is not type(None)]
        return rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]  # noqa: UP007  (made at run time)
    return kind


def read(
    schema: Callable[..., T],
    words: Sequence[str],
    command: str,
    *,
    positional: str = "",
    usage: str = "",
    short: Mapping[str, str] | None = None,
    bare: Mapping[str, str] | None = None,
) -> T:
    """What was given, checked against its types; prints help and ends the process where that is asked for.

    `positional`: the field of words without a flag. `usage`: what they are called. `short`: -o -> out.
    `bare`: the word that a flag stands for which is given without one.
    """
    kind = typing.cast(type, schema)
    if any(word in HELP for word in words):
        sys.stdout.write(help_of(kind, command, positional=positional, usage=usage))
        raise SystemExit(0)
    given, problems = taken(flags_of(kind), words, positional, short or {}, bare or {})
    values: dict[str, Any] = {}
    for name, flag in flags_of(kind).items():
        if name in given:
            try:
                values[name] = flag.read(given[name])
            except Mismatch as mismatch:
                called = (usage or name.upper()) if name == positional else flag.text
                problems.append(mismatch_text(called, " ".join(given[name]), flag.kind, mismatch))
        elif flag.default is dataclasses.MISSING:
            problems.append(f"{usage or flag.text} is missing; see {pasted(command, '--help')}")
    if problems:
        raise ConfigError(problems)
    return schema(**values)


def taken(
    flags: Mapping[str, Flag],
    words: Sequence[str],
    positional: str,
    short: Mapping[str, str],
    bare: Mapping[str, str],
) -> tuple[dict[str, list[str]], list[str]]:
    """(field -> its words, what is wrong with the rest)."""
    given: dict[str, list[str]] = {}
    problems, rest = [], list(words)
    listed = bool(positional) and flags[positional].many
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or (word[1:2].isdigit() and positional):
            if positional and (flags[positional].many or positional not in given):
                given.setdefault(positional, []).append(word)
            else:
                problems.append(f"{word}: unexpected; flags are given as --name value")
            continue
        text, has_value, value = word.partition("=")
        name = short.get(text, text.removeprefix("--").replace("-", "_") if text.startswith("--") else "")
        if name not in flags and name.startswith("no_") and name[3:] in flags and not has_value:
            name, has_value, value = name[3:], "=", "false"
        if name not in flags:
            problems.append(unknown_flag(text, [key for key in flags if key != positional]))
            while rest and not rest[0].startswith("-"):
                rest.pop(0)  # its values are no mistake of their own
            continue
        flag = flags[name]
        values = [value] if has_value else []
        most = 0 if flag.kind is bool or has_value else len(rest) if flag.many and not listed else 1
        while rest and len(values) < most and not rest[0].startswith("--") and rest[0] not in short:
            values.append(rest.pop(0))
        values = values or (["true"] if is_switch(flag.kind) else [bare[name]] if name in bare else [])
        if not values and not flag.many:
            problems.append(f"{flag.text} needs {flag.wants} behind it")
            continue
        given[name] = [*given.get(name, ()), *values] if flag.many else values
    return given, problems


def help_of(schema: type, command: str, *, positional: str = "", usage: str = "") -> str:
    flags = flags_of(schema)
    called = usage or positional.upper()
    optional = positional and flags[positional].default is not dataclasses.MISSING
    first = f" [{called}]" if optional else f" {called}" if positional else ""
    rows = [(called, flags[positional].doc, "")] if positional else []
    for flag in flags.values():
        if flag.name != positional:
            rows.append((f"{flag.text} {flag.wants}".strip(), flag.doc, shown(flag)))
    what = textwrap.wrap(schema.__doc__ or "", WIDTH, break_on_hyphens=False)
    lines = [f"usage: moeclipse {command}{first} [flags]", "", *what, "", *columns(rows)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Lines of (flag, what it is for, its value in brackets)."""
    left, lines = min(max(len(text) for text, _, _ in rows), 26), []
    for text, doc, default in rows:
        about = (lowered(doc) + default).strip()
        told = textwrap.wrap(about, WIDTH - left - 4, break_on_hyphens=False) or [""]
        beside = len(text) <= left
        lines += [f"  {text:<{left}}  {told[0]}"] if beside else [f"  {text}", f"  {'':<{left}}  {told[0]}"]
        lines += [f"  {'':<{left}}  {line}" for line in told[1:]]
    return lines


def lowered(doc: str) -> str:
    """A sentence as the words behind a flag: small, unless it begins with a name, and without its dot."""
    first = doc.partition(" ")[0]
    begins = doc[:1].lower() if first[1:].islower() or first == "A" else doc[:1]
    return (begins + doc[1:]).removesuffix(".")


def shown(flag: Flag) -> str:
    """Its default, where that says something."""
    if flag.kind is bool or flag.default in (None, "", (), dataclasses.MISSING):
        return ""
    return f" ({flag.default})"
