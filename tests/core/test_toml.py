"""TOML files in, trees of dataclasses out, and back again."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.core.config import from_table
from moeclipse.core.errors import ConfigError
from moeclipse.core.toml import docs_of, read_toml, to_toml, toml_value


@dataclass(frozen=True, kw_only=True)
class Inner:
    text: str = ""
    """What it says,
    over two lines."""
    items: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    whole: int = 0
    """A number."""
    real: float = 0.0
    flag: bool = False
    inner: Inner = field(default_factory=Inner)


TEXT = st.text(st.characters(codec="utf-8"))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
INNER = st.builds(Inner, text=TEXT, items=st.lists(TEXT, max_size=3).map(tuple))
OUTER = st.builds(Outer, whole=st.integers(-(2**63), 2**63 - 1), real=FINITE, flag=st.booleans(), inner=INNER)


@given(OUTER, st.booleans())
def test_what_is_written_reads_back_equal(config: Outer, comments: bool) -> None:
    table = tomllib.loads(to_toml(config, comments=comments))
    assert from_table(Outer, table, "text") == config


def test_comments_are_the_descriptions_of_the_keys() -> None:
    assert docs_of(Inner) == {"text": "What it says, over two lines."}
    assert to_toml(Outer(), comments=True).splitlines()[0] == "whole = 0  # A number."
    assert "#" not in to_toml(Outer())


def test_a_class_without_source_has_no_descriptions() -> None:
    scope: dict = {}
    exec("class Typed:\n    a: int = 1\n    'doc'\n", scope)
    assert docs_of(scope["Typed"]) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = \n", r"bad\.toml: not valid TOML: .*line 1"),
        (b"[run]\nsteps = 1\nsteps = 2\n", r"bad\.toml: not valid TOML: .*line 3"),
        (b"a = '\xff'", r"bad\.toml is not UTF-8 text \(byte 5\)"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_toml(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nix\.toml: no such file; give the path of a TOML configuration"):
        read_toml(tmp_path / "nix.toml")
    with pytest.raises(ConfigError, match=r"cannot be read \(it is a folder, not a regular file\)"):
        read_toml(tmp_path)


def test_values_that_toml_has_no_word_for() -> None:
    with pytest.raises(TypeError, match="TOML cannot hold None"):
        toml_value(None)


@pytest.mark.parametrize("character", ["\x7f", "\x00", "\x1b", "\\", '"', "\n", "\x85"])
def test_characters_that_toml_forbids_in_a_text(character: str) -> None:
    assert tomllib.loads(f"a = {toml_value(character)}") == {"a": character}


def test_a_class_describes_what_it_changes_of_its_base() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Changed(Outer):
        whole: int = 1
        """Another number."""

    assert docs_of(Changed) == {"whole": "Another number."}
