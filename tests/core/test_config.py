"""Layers of a configuration: what is read, what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import pytest

from moeclipse.core.config import (
    build,
    flag_layer,
    from_table,
    keys_of,
    named_in,
    table_layer,
    to_flat,
    validate,
    with_values,
)
from moeclipse.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Gate:
    kind: Literal["softmax", "sigmoid"] = "softmax"
    top_k: int = 2
    scale: float = 1.0

    def problems(self) -> Iterator[str]:
        if self.top_k < 1:
            yield f"gate.top_k ({self.top_k}) must be at least 1"


@dataclass(frozen=True, kw_only=True)
class Layout:
    ep: int | Literal["auto"] = "auto"
    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    shuffle: bool = True
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Tree:
    gate: Gate = field(default_factory=Gate)
    layout: Layout = field(default_factory=Layout)
    num_experts: int = 8

    def problems(self) -> Iterator[str]:
        if self.gate.top_k > self.num_experts:
            yield f"gate.top_k ({self.gate.top_k}) must be at most num_experts ({self.num_experts})"


def read(table: dict, *flags: str) -> Tree:
    layer, problems = table_layer(Tree, table, "my.toml")
    more, worse = flag_layer(Tree, flags)
    return build(Tree, [layer, more], problems + worse).checked()


def refused(table: dict, *flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(table, *flags)
    return caught.value.problems


def test_keys_are_dotted_and_typed() -> None:
    keys = keys_of(Tree)
    assert list(keys)[:3] == ["gate.kind", "gate.top_k", "gate.scale"]
    assert keys["num_experts"] is int


def test_later_layers_win_and_defaults_stay() -> None:
    config = read({"gate": {"top_k": 3, "scale": 2}, "num_experts": 4}, "--gate.top-k", "4")
    assert config == Tree(gate=Gate(top_k=4, scale=2.0), num_experts=4)
    assert isinstance(config.gate.scale, float)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--gate.top-k", "3"], "gate.top_k", 3),
        (["--gate.top_k=3"], "gate.top_k", 3),
        (["--gate.scale", "-1e-3"], "gate.scale", -1e-3),
        (["--layout.ep", "auto"], "layout.ep", "auto"),
        (["--layout.ep", "4"], "layout.ep", 4),
        (["--layout.shuffle"], "layout.shuffle", True),
        (["--layout.shuffle", "false"], "layout.shuffle", False),
        (["--layout.no-shuffle"], "layout.shuffle", False),
        (["--layout.files", "a*.txt", "b"], "layout.files", ("a*.txt", "b")),
        (["--layout.files", "--layout.name", "x"], "layout.files", ()),
        (["--layout.sizes", "1", "2"], "layout.sizes", (1, 2)),
        (["--layout.name", "7"], "layout.name", "7"),
        (["--layout.name="], "layout.name", ""),
        (["--layout.name=--x"], "layout.name", "--x"),
    ],
)
def test_flags_are_read_as_their_type(words: list[str], key: str, value: object) -> None:
    assert to_flat(read({}, *words))[key] == value


def test_boolean_flag_leaves_the_next_word_alone() -> None:
    layer, problems = flag_layer(Tree, ["--layout.shuffle", "run.toml"], positional="layout.name")
    assert not problems
    assert build(Tree, [layer]).checked().layout.name == "run.toml"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"gate": {"top_kk": 2}}, "gate.top_kk: unknown key; did you mean gate.top_k? (my.toml)"),
        ({"layout": {"top_k": 2}}, "layout.top_k: unknown key; did you mean gate.top_k? (my.toml)"),
        ({"top_k": 2}, "top_k: unknown key; did you mean gate.top_k? (my.toml)"),
        ({"gate": {"zzz": 2}}, "gate.zzz: unknown key; gate has kind, top_k, scale (my.toml)"),
        ({"gaet": {"top_k": 2}}, "[gaet]: unknown section; did you mean [gate]? (my.toml)"),
        ({"zzzz": {"a": 2}}, "[zzzz]: unknown section; the sections are gate, layout (my.toml)"),
        ({"zzzz": 1}, "zzzz: unknown key; the sections are gate, layout (my.toml)"),
        ({"gate": 3}, "gate = 3: expected a table [gate] with kind, top_k, scale (my.toml)"),
        ({"gate": {"top_k": 2.0}}, "gate.top_k = 2.0: expected a whole number (my.toml)"),
        ({"gate": {"top_k": True}}, "gate.top_k = True: expected a whole number (my.toml)"),
        ({"gate": {"scale": "1"}}, "gate.scale = '1': expected a number (my.toml)"),
        ({"gate": {"scale": float("nan")}}, "gate.scale = nan: expected a finite number (my.toml)"),
        (
            {"gate": {"kind": "sofmax"}},
            "gate.kind = 'sofmax': expected one of softmax, sigmoid; did you mean 'softmax'? (my.toml)",
        ),
        (
            {"layout": {"ep": "atuo"}},
            "layout.ep = 'atuo': expected a whole number or \"auto\"; did you mean 'auto'? (my.toml)",
        ),
        ({"layout": {"files": "a"}}, "layout.files = 'a': expected a list of texts (my.toml)"),
        ({"layout": {"sizes": [1, "b"]}}, "layout.sizes = [1, 'b']: expected a whole number (my.toml)"),
        ({"layout": {"shuffle": 1}}, "layout.shuffle = 1: expected true or false (my.toml)"),
        ({"layout": {"name": {"a": 1}}}, "layout.name = {'a': 1}: expected text (my.toml)"),
        ({"gate": {"top_k": 0}}, "gate.top_k (0) must be at least 1 (my.toml)"),
    ],
)
def test_each_problem_of_a_table_says_what_and_where(table: dict, message: str) -> None:
    assert refused(table) == [message]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gate.top-kk", "2"], "--gate.top-kk: unknown flag; did you mean --gate.top-k?"),
        (["--num-expert", "2"], "--num-expert: unknown flag; did you mean --num-experts?"),
        (
            ["--gate.kind", "Sigmoid"],
            "expected one of softmax, sigmoid; did you mean 'sigmoid'? (--gate.kind)",
        ),
        (["--gate.top-k", "two"], "gate.top_k = 'two': expected a whole number (--gate.top-k)"),
        (["--gate.scale", "inf"], "gate.scale = 'inf': expected a finite number (--gate.scale)"),
        (["--gate.top-k"], "gate.top_k: expected a whole number after --gate.top-k"),
        (["--gate.top-k", "--num-experts", "3"], "gate.top_k: expected a whole number after --gate.top-k"),
        (["--layout.shuffle=maybe"], "layout.shuffle = 'maybe': expected true or false (--layout.shuffle)"),
        (["--num-expert", "2", "3"], "--num-expert: unknown flag; did you mean --num-experts?"),
        (["stray"], "stray: unexpected; flags are given as --name value"),
        (["-x"], "-x: unexpected; flags are given as --name value"),
    ],
)
def test_each_problem_of_a_flag_says_what_and_where(words: list[str], message: str) -> None:
    problems = refused({}, *words)
    assert len(problems) == 1
    assert message in problems[0]


def test_all_problems_come_together() -> None:
    problems = refused(
        {"gate": {"top_kk": 1, "kind": "x"}}, "--num-experts", "abc", "--gate.top-k", "0", "--what"
    )
    assert len(problems) == 5
    with pytest.raises(ConfigError, match="5 problems:\n  - "):
        read({"gate": {"top_kk": 1, "kind": "x"}}, "--num-experts", "abc", "--gate.top-k", "0", "--what")


def test_between_sections_the_problem_names_both_places() -> None:
    problems = refused({"num_experts": 4}, "--gate.top-k", "9")
    assert problems == [
        "gate.top_k (9) must be at most num_experts (4) "
        "(gate.top_k from --gate.top-k, num_experts from my.toml)"
    ]


def test_no_complaint_about_a_value_that_nobody_gave() -> None:
    """num_experts falls back to 8 only so that the rest can be checked."""
    assert refused({"num_experts": "nine"}, "--gate.top-k", "9") == [
        "num_experts = 'nine': expected a whole number (my.toml)"
    ]


def test_a_mistake_that_a_flag_covers_is_still_told() -> None:
    assert refused({"num_experts": "nine"}, "--num-experts", "9") == [
        "num_experts = 'nine': expected a whole number (my.toml)"
    ]


def test_validate_walks_every_section() -> None:
    good = Tree()
    assert validate(good) is good
    with pytest.raises(ConfigError) as caught:
        validate(Tree(gate=Gate(top_k=-1), num_experts=-2))
    assert len(caught.value.problems) == 2
    assert caught.value.code == 2


def test_with_values_changes_only_what_it_names() -> None:
    assert with_values(Tree(), {"gate.top_k": 5}) == Tree(gate=Gate(top_k=5))


def test_from_table() -> None:
    assert from_table(Tree, {"layout": {"files": ["a"]}}, "x") == Tree(layout=Layout(files=("a",)))


def test_a_flag_that_covers_a_mistake_is_checked_itself() -> None:
    assert refused({"gate": {"top_k": "two"}}, "--gate.top-k", "0") == [
        "gate.top_k = 'two': expected a whole number (my.toml)",
        "gate.top_k (0) must be at least 1 (--gate.top-k)",
    ]


def test_a_key_is_not_named_by_its_beginning() -> None:
    keys = ["gate.top_k", "gate.top_k_decay", "top_k"]
    assert named_in("gate.top_k_decay (2) must lie below 1", keys) == ["gate.top_k_decay"]
    assert named_in("gate.top_k (2) must be at most 1.", keys) == ["gate.top_k"]


def test_what_no_file_can_hold_is_refused() -> None:
    """Python reads a path whose bytes are not UTF-8 all the same."""
    layer, problems = flag_layer(Tree, ["--layout.name", "caf\udce9"])
    assert problems == ["layout.name: what stands behind --layout.name is not UTF-8 text"]
    assert not layer


def test_a_flag_s_value_may_hold_an_equals_sign() -> None:
    assert read({}, "--layout.name=lr=1e-3").layout.name == "lr=1e-3"
