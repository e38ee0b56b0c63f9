"""A key that has a new name is still read: from files, flags, Python and what a checkpoint stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from moeclipse.core.config import build, flag_layer, from_table, table_layer, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.core.renames import with_new_names
from moeclipse.train.fingerprint import differences, in_present_terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    top_k: int = 2
    even: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    gate: Gate = dataclasses.field(default_factory=Gate)
    steps: int = 10

    RENAMED: ClassVar[Mapping[str, str]] = {
        "gate.experts": "gate.top_k",
        "router.even": "gate.even",
        "length": "steps",
    }


NOTE = "gate.experts is now called gate.top_k; the old name still works"


def test_a_file_with_old_names() -> None:
    table = {"gate": {"experts": 3}, "router": {"even": False}, "length": 7}
    layer, problems = table_layer(Config, table, "old.toml")
    built = build(Config, [layer], problems)
    assert built.checked() == Config(gate=Gate(top_k=3, even=False), steps=7)
    assert built.notes == (
        f"{NOTE} (old.toml)",
        "router.even is now called gate.even; the old name still works (old.toml)",
        "length is now called steps; the old name still works (old.toml)",
    )
    with pytest.warns(FutureWarning, match="length is now called steps"):
        assert from_table(Config, {"length": 7}, "old.toml").steps == 7


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gate.experts", "3"], Config(gate=Gate(top_k=3))),
        (["--gate.experts=3", "--length", "4"], Config(gate=Gate(top_k=3), steps=4)),
        (["--router.no-even"], Config(gate=Gate(even=False))),
        (["--router.even"], Config()),
    ],
)
def test_old_flags(words: list[str], expected: Config) -> None:
    layer, problems = flag_layer(Config, words)
    built = build(Config, [layer], problems)
    assert built.checked() == expected
    assert len(built.notes) == sum(word.startswith("--") for word in words)


def test_a_flag_wins_over_a_file_whichever_name_is_used() -> None:
    file, _ = table_layer(Config, {"gate": {"top_k": 3}}, "new.toml")
    flags, _ = flag_layer(Config, ["--gate.experts", "4"])
    assert build(Config, [file, flags]).checked().gate.top_k == 4
    file, _ = table_layer(Config, {"gate": {"experts": 3}}, "old.toml")
    flags, _ = flag_layer(Config, ["--gate.top-k", "4"])
    assert build(Config, [file, flags]).checked().gate.top_k == 4


def test_both_names_at_once_are_a_problem() -> None:
    told = "gate.experts is the old name of gate.top_k; give only one of them"
    for table in ({"gate": {"experts": 3, "top_k": 4}}, {"gate": {"top_k": 4, "experts": 3}}):
        assert table_layer(Config, table, "my.toml")[1] == [f"{told} (my.toml)"]
    assert flag_layer(Config, ["--gate.top-k", "4", "--gate.experts", "3"])[1] == [f"{told} (--gate.experts)"]


def test_a_wrong_value_is_told_under_the_name_that_was_used() -> None:
    layer, problems = table_layer(Config, {"gate": {"experts": "many"}}, "old.toml")
    with pytest.raises(ConfigError, match=r"gate\.experts = 'many': expected a whole number \(old\.toml\)"):
        build(Config, [layer], problems).checked()


def test_from_python() -> None:
    with pytest.warns(FutureWarning, match=NOTE):
        assert with_values(Config(), {"gate.experts": 5}).gate.top_k == 5
    with pytest.raises(ConfigError, match=r"gate\.top_kk: unknown key; did you mean gate\.top_k\?"):
        with_values(Config(), {"gate.top_kk": 5})


def test_what_a_checkpoint_stored() -> None:
    stored: dict[str, Any] = {"gate": {"experts": 3}, "length": 7, "router": {"even": False}}
    assert with_new_names(Config, stored) == {
        "gate": {"top_k": 3, "even": False},
        "router": {},
        "steps": 7,
    }
    expected = {"gate": {"top_k": 3, "even": True}}
    old = {"gate": {"experts": 3}}
    assert not differences(in_present_terms(old, expected, Config()), expected)
    assert differences(in_present_terms({"gate": {"experts": 4}}, expected, Config()), expected) == [
        "gate.top_k is 4 in the checkpoint, 3 in this run"
    ]


def test_a_key_that_came_later_was_at_its_default() -> None:
    stored = {"gate": {"top_k": 3}}
    now = {"gate": {"top_k": 3, "even": False}}
    assert differences(in_present_terms(stored, now, Config()), now) == [
        "gate.even is True in the checkpoint, False in this run"
    ]
    assert in_present_terms({}, now, Config()) == {}, "what stored nothing is not taken for the defaults"
