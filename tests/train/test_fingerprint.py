"""Differences between two runs are named field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from moeclipse.train.fingerprint import differences, in_present_terms


def test_names_every_field_that_differs() -> None:
    old = {"model": {"d_model": 128, "layers": 2, "rope": {}}, "gone": 1}
    new = {"model": {"d_model": 256, "layers": 2, "rope": {}, "dropout": 0.0}}
    assert differences(old, new) == [
        "model.d_model is 128 in the checkpoint, 256 in this run",
        "model.dropout is absent from the checkpoint, 0.0 in this run",
        "gone is 1 in the checkpoint, absent from this run",
    ]


def test_a_tuple_equals_the_list_that_json_made_of_it() -> None:
    assert differences({"shape": [1, 2]}, {"shape": (1, 2)}) == []


def test_an_empty_section_differs_from_a_full_one() -> None:
    assert differences({"a": {}}, {"a": {"b": 1}}) != []


def test_prefix() -> None:
    assert differences({"seed": 1}, {"seed": 2}, prefix="data") == [
        "data.seed is 1 in the checkpoint, 2 in this run"
    ]


@dataclass(frozen=True, kw_only=True)
class Gate:
    top_k: int = 2
    noise: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Config:
    gate: Gate = field(default_factory=Gate)

    RENAMED: ClassVar[Mapping[str, str]] = {"gate.experts": "gate.top_k"}


def test_an_old_fingerprint_is_read_in_present_terms() -> None:
    """`experts` has another name by now, and `noise` came later: its default is what was done before."""
    old = {"gate": {"experts": 4}}
    expected = {"gate": {"top_k": 4, "noise": 0.5}}
    assert in_present_terms(old, expected, Config()) == expected
    assert old == {"gate": {"experts": 4}}, "what was stored stays as it is"
    other = {"gate": {"top_k": 4, "noise": 0.1}}
    assert differences(in_present_terms(old, other, Config()), other) == [
        "gate.noise is 0.5 in the checkpoint, 0.1 in this run"
    ]


def test_nothing_is_made_up_for_a_section_that_was_not_stored() -> None:
    assert in_present_terms({}, {"gate": {"noise": 0.5}, "style": {"x": 1}}, Config()) == {}
    assert in_present_terms({"style": {"y": 1}}, {"style": {"x": 1}}, Config()) == {"style": {"y": 1}}
