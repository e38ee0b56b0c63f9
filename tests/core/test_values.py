"""One value of a configuration: taken as it is or refused, never bent; and read from words."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.core.values import (
    Mismatch,
    convert,
    expected_text,
    is_item,
    is_switch,
    list_in,
    mismatch_text,
    nearest,
    read_words,
)

SHADOW = Literal["auto", "off"] | tuple[int, ...]
TABLE = tuple[tuple[int, ...], ...] | str


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (True, bool, True),
        ("auto", int | Literal["auto"], "auto"),
        ([1, 2], SHADOW, (1, 2)),
        ([[0, 3], [1]], TABLE, ((0, 3), (1,))),
        ("file.json", TABLE, "file.json"),
        ([], tuple[str, ...], ()),
    ],
)
def test_a_value_of_its_type_is_taken(value: object, kind: Any, expected: object) -> None:
    found = convert(value, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (True, int, "a whole number"),
        (2.0, int, "a whole number"),
        ("2", float, "a number"),
        (float("inf"), float, "a finite number"),
        (1, bool, "true or false"),
        (1, Literal["auto"], '"auto"'),
        (True, Literal[1, 2], "one of 1, 2"),
        ("fast", SHADOW, "one of auto, off or a list of whole numbers"),
        ([1.5], tuple[int, ...], "a whole number"),
    ],
)
def test_no_value_is_bent_to_fit(value: object, kind: Any, words: str) -> None:
    with pytest.raises(Mismatch) as caught:
        convert(value, kind)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        (["3"], int, 3),
        (["3"], str, "3"),
        (["1e-3"], float, 1e-3),
        (["YES"], bool, True),
        (["0"], bool, False),
        (["auto"], SHADOW, "auto"),
        (["0", "2"], SHADOW, (0, 2)),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        (["[[0],[1]]"], TABLE, "[[0],[1]]"),
    ],
)
def test_words_are_read_as_the_declared_type(words: list[str], kind: Any, expected: object) -> None:
    found = read_words(words, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (["maybe"], bool, "true or false"),
        (["two"], int, "a whole number"),
        (["nan"], float, "a finite number"),
        (["1", "x"], tuple[int, ...], "a whole number"),
    ],
)
def test_words_that_say_no_such_value(words: list[str], kind: Any, text: str) -> None:
    with pytest.raises(Mismatch, match=text):
        read_words(words, kind)


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reads_back_from_its_own_words(value: float) -> None:
    assert read_words([repr(value)], type(value)) == value


def test_a_list_may_stand_where_one_word_may() -> None:
    assert list_in(SHADOW) == tuple[int, ...]
    assert list_in(TABLE) is None, "any word is a text already"
    assert list_in(int) is None
    assert is_item("3", tuple[int, ...])
    assert not is_item("auto", tuple[int, ...])


def test_true_and_false_may_stand_beside_a_word() -> None:
    kind = bool | Literal["auto"]
    read = [read_words([word], kind) for word in ("auto", "true", "no")]
    assert read == ["auto", True, False]
    with pytest.raises(Mismatch, match='"auto"'):
        read_words(["often"], kind)
    assert is_switch(kind)
    assert is_switch(bool)
    assert not is_switch(int | Literal["auto"])


def test_a_mismatch_names_the_key_and_the_nearest_word() -> None:
    found = mismatch_text("moe.shadow", "atuo", SHADOW, Mismatch("this"))
    assert found == "moe.shadow = 'atuo': expected this; did you mean 'auto'?"
    assert expected_text(tuple[float, ...]) == "a list of numbers"


def test_a_type_that_cannot_be_configured_is_the_developers_error() -> None:
    with pytest.raises(TypeError, match="cannot hold"):
        convert(1, dict)


def test_nearest() -> None:
    assert nearest("trian", ["train", "doctor"]) == "train"
    assert nearest("xyz", ["train", "doctor"]) is None


@dataclasses.dataclass(frozen=True)
class Table:
    name: str = ""
    share: float = 1.0


def test_a_list_of_tables() -> None:
    kind = tuple[Table, ...]
    assert convert([], kind) == ()
    assert convert([{"name": "a"}, {"share": 2}], kind) == (Table("a"), Table(share=2.0))
    assert convert((Table("a"),), kind) == (Table("a"),)
    for value, says in [
        ([{"nmae": "a"}], "no key 'nmae' in it; did you mean 'name'?"),
        ([{"zzz": "a"}], "no key 'zzz' in it; there are name, share"),
        ([{"share": "a"}], "share to be a number"),
        ((Table(3),), "name to be text"),  # type: ignore[arg-type]
        (["a"], "a table with name, share"),
        ("a", "tables, one for each, in a configuration file"),
    ]:
        with pytest.raises(Mismatch, match=re.escape(says)):
            convert(value, kind)
    with pytest.raises(Mismatch, match="tables, one for each, in a configuration file"):
        read_words(["a"], kind)
