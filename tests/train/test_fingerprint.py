"""Differences between two runs are named field by field."""

from __future__ import annotations

from moeclipse.train.fingerprint import differences


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
