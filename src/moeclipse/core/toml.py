"""TOML in and out: files to tables, and trees of dataclasses to text that reads back equal.

The standard library reads TOML but does not write it; a configuration needs only scalars, arrays of
scalars, nested tables and arrays of tables, so that is all there is here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import read_text, told_of


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file; ConfigError names file, line and what is wrong."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML configuration") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a TOML file") from None
    except ValueError as error:
        raise ConfigError(f"{told_of(path, error)}; expected a TOML file") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The table in TOML text; `origin` is what a ConfigError calls it."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise ConfigError(f"{origin}: not valid TOML: {error}") from None


def to_toml(config: Any, comments: bool = False) -> str:
    """The configuration as TOML that reads back equal; with comments, each key's own description."""
    return "\n".join(_toml_lines(config, "", comments)).strip("\n") + "\n"


def _toml_lines(config: Any, prefix: str, comments: bool) -> Iterator[str]:
    docs = docs_of(type(config)) if comments else {}
    tables: list[tuple[str, Any]] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((f"{prefix}{field.name}", value))
            continue
        if value and isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
            tables += [(f"{prefix}{field.name}", value)]
            continue
        comment = f"  # {docs[field.name]}" if field.name in docs else ""
        yield f"{field.name} = {toml_value(value)}{comment}"
    for name, section in tables:
        for one in section if isinstance(section, tuple) else (section,):
            yield ""
            yield f"[[{name}]]" if isinstance(section, tuple) else f"[{name}]"
            yield from _toml_lines(one, f"{name}.", comments)


def toml_value(value: Any) -> str:
    """One value in TOML's spelling."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return f'"{"".join(map(_toml_character, value))}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"TOML cannot hold {value!r}")


def _toml_character(character: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in short:
        return short[character]
    return f"\\u{ord(character):04x}" if ord(character) < 32 or ord(character) == 127 else character


def docs_of(schema: type) -> dict[str, str]:
    """Field -> the string that stands below it in the source, those of its bases included.

    Empty where the source cannot be read.
    """
    found: dict[str, str] = {}
    for part in reversed(schema.__mro__[:-1]):
        found |= _docs_in(part)
    return found


def _docs_in(schema: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            doc = getattr(below.value, "value", None)
            if isinstance(doc, str):
                found[ast.unparse(field.target)] = " ".join(doc.split())
    return found
