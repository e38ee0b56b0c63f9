"""Which cases a test has, as its source tells: no file is imported, and nothing of torch is loaded.

Of a file only those statements run which a list of cases needs, with `Unknown` for what comes from a library.
What depends on one is unknown, too, and where it would stand in the name of a case, anything may.
"""

from __future__ import annotations
import __future__

import ast
import enum
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

SOURCE = Path(__file__).parent.parent / "src"
KNOWN = {"pytest", *sys.stdlib_module_names}
"""Libraries that are cheap to import."""
WHATEVER, ANY = "\0", ".*"
LONG = 100
"""Pytest numbers longer texts."""


class Unknown:
    """Nothing can be asked of it that decides something: who does becomes unknown himself."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> Unknown:
        return Unknown()

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown()

    def __repr__(self) -> str:
        return WHATEVER

    def __bool__(self) -> NoReturn:
        raise TypeError

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError


class Names(dict[str, Any]):
    """What a file gives names to, worked out when it is asked for."""

    def __init__(self, file: Path) -> None:
        super().__init__(__name__=file.stem, __file__=str(file))
        self.file = file
        self.tree = ast.parse(file.read_text(), str(file))
        self.statements: dict[str, list[ast.stmt]] = {}
        for node in self.tree.body:
            for name in bound(node):
                self.statements.setdefault(name, []).append(node)

    def __missing__(self, name: str) -> Any:
        statements = self.statements[name]  # of a builtin there is none
        self[name] = Unknown()  # for who asks meanwhile
        try:
            for node in statements:
                self.run(node, name)
        except (Exception, pytest.skip.Exception):
            self[name] = Unknown()
        return self[name]

    def run(self, node: ast.stmt, name: str) -> None:
        if isinstance(node, ast.Import):
            (module,) = (a.name for a in node.names if bound_by(a) == name)
            known = module.partition(".")[0] in KNOWN
            self[name] = importlib.import_module(module.partition(".")[0]) if known else Unknown()
        elif isinstance(node, ast.ImportFrom):
            (its_name,) = (a.name for a in node.names if bound_by(a) == name)
            self[name] = self.from_elsewhere(node, its_name)
        else:
            exec(code(ast.Module([node], []), "exec"), self)

    def from_elsewhere(self, node: ast.ImportFrom, name: str) -> Any:
        module = node.module or ""
        folders = [self.file.parents[node.level - 1]] if node.level else [SOURCE, *self.file.parents]
        for path in (folder / f"{module.replace('.', '/')}.py" for folder in folders):
            if path.is_file():
                return names_of(path)[name]
        known = module.partition(".")[0] in KNOWN
        return getattr(importlib.import_module(module), name) if known else Unknown()

    def value(self, node: ast.expr) -> Any:
        try:
            return eval(code(ast.Expression(node), "eval"), self)
        except Exception:
            return Unknown()


@functools.cache
def names_of(file: Path) -> Names:
    return Names(file)


def code(node: Any, mode: str) -> Any:
    return compile(node, "a test", mode, __future__.annotations.compiler_flag, True)


def bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement gives, or adds something to."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from map(bound_by, node.names)
    else:
        for part in ast.walk(node):
            if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name):
                part = ast.Name(part.value.id, part.ctx)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


@dataclass(frozen=True)
class DeclaredTest:
    """A test, and how its cases are called."""

    names: Names
    node: ast.FunctionDef
    decorators: list[ast.expr]
    """The nearest first, as pytest puts a name together; those of its class behind."""

    def cases(self) -> re.Pattern[str]:
        fixtures = (node for a in self.node.args.args for node in self.names.statements.get(a.arg, ()))
        if any("params=" in ast.unparse(d) for f in fixtures for d in getattr(f, "decorator_list", ())):
            return re.compile(ANY, re.DOTALL)
        parts = []
        for decorator in self.decorators:
            mark = self.names.value(decorator)
            if isinstance(mark, pytest.MarkDecorator) and mark.name == "parametrize":
                parts.append(alternatives(*mark.args, **mark.kwargs))
            elif isinstance(mark, Unknown) and "parametrize" in ast.unparse(decorator):
                parts.append(ANY)
        return re.compile("-".join(parts), re.DOTALL)


@functools.cache
def declared_tests(file: Path) -> dict[str, DeclaredTest]:
    """By what pytest calls them behind the name of their file."""
    names = names_of(file)

    def look(nodes: list[ast.stmt], before: str, outer: list[ast.expr]) -> Iterator[tuple[str, DeclaredTest]]:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                decorators = [*reversed(node.decorator_list), *outer]
            if isinstance(node, ast.ClassDef):
                yield from look(node.body, f"{before}{node.name}::", decorators)
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield before + node.name, DeclaredTest(names, node, decorators)

    return dict(look(names.tree.body, "", []))


def alternatives(arguments: Any, values: Any, *, ids: Any = None, **_: object) -> str:
    """What one `parametrize` adds to a name."""
    if isinstance(values, Unknown):
        return ANY
    names = [name.strip() for name in arguments.split(",")] if isinstance(arguments, str) else list(arguments)
    convert, listed = (ids, None) if ids is None or callable(ids) else (None, list(ids))
    told = []
    for index, value in enumerate(values):
        is_param = hasattr(value, "marks")
        name = listed[index] if listed is not None else value.id if is_param else None
        row = value.values if is_param else [value] if len(names) == 1 else value
        if isinstance(value, Unknown):
            told.append(ANY)
        elif name is not None:
            told.append(part_of_a_name(name, ""))
        else:
            parts = (part_of_a_name(v, f"{n}{index}", convert) for n, v in zip(names, row, strict=True))
            told.append("-".join(parts))
    return f"({'|'.join(told)})"


def part_of_a_name(value: Any, numbered: str, convert: Any = None) -> str:
    """As pytest calls one value."""
    if convert is not None and not isinstance(value, Unknown):
        own = convert(value)
        value = value if own is None else own
    if isinstance(value, Unknown):
        return ANY
    if isinstance(value, str):
        text = value.encode("unicode_escape").decode() if WHATEVER not in value else value
        return f"({escaped(text)}|{numbered})" if len(value) > LONG else escaped(text)
    if value is None or isinstance(value, bool | int | float | complex | enum.Enum):
        return escaped(str(value))
    return escaped(getattr(value, "__name__", None) or getattr(value, "pattern", None) or numbered)


def escaped(text: str) -> str:
    return re.escape(text).replace(re.escape(WHATEVER), ANY)
