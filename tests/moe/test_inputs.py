"""Tensors that travel together, as they were given; the type of rows, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.core.errors import ConfigError
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Structure, rows_for

X, MORE = torch.ones(4, 3), torch.arange(4)


@pytest.mark.parametrize("given", [X, (X, MORE), {"x": X, "more": MORE}], ids=["tensor", "tuple", "dict"])
def test_what_is_put_together_is_what_was_given(given: Any) -> None:
    structure, tensors = Structure.take_apart(given)
    assert tensors[0] is X
    again = structure.put_together(tensors)
    assert type(again) is type(given)
    assert structure.flatten(again) == tensors
    assert str(again) == str(given)


def test_a_list_is_a_tuple_from_then_on() -> None:
    structure, tensors = Structure.take_apart([X, MORE])
    assert structure.put_together(tensors) == (X, MORE)


def test_the_order_of_keys_is_that_of_the_first_dict() -> None:
    structure, _ = Structure.take_apart({"x": X, "more": MORE})
    assert structure.flatten({"more": "second", "x": "first"}) == ("first", "second")


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        ((X, torch.arange(5)), r"\(4, 3\), \(5,\)"),
        ((MORE, X), r"\(4,\), \(4, 3\)"),
        ({"x": X.long(), "more": MORE}, r"\(4, 3\), \(4,\)"),
        ((X[None], MORE[:1]), r"\(1, 4, 3\), \(1,\)"),
    ],
    ids=["other length", "first is no matrix", "first is not floating", "three dimensions"],
)
def test_tensors_that_cannot_travel_together_are_named(given: Any, shapes: str) -> None:
    with pytest.raises(ConfigError, match=f"same leading size, .*got shapes {shapes}"):
        Structure.take_apart(given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_tokens_that_are_no_vectors_are_told_so_by_the_layer(dtype: torch.dtype) -> None:
    moe = MoE(4, 4, 2, top_k=1)
    kind = str(dtype).removeprefix("torch.")
    said = f"{kind} tokens; give it vectors"
    for on in (False, True):
        with torch.autocast("cpu", enabled=on), pytest.raises(ConfigError, match=said):
            moe(torch.ones(3, 4, dtype=dtype))


def test_one_vector_is_one_token_and_one_number_is_none() -> None:
    moe, x = MoE(4, 4, 2, top_k=1), torch.rand(3, 4)
    alone = moe(x[1])
    assert alone.shape == (4,)
    assert torch.equal(alone, moe(x[1:2])[0])
    assert torch.equal(moe(x[1], mask=torch.tensor(True)), alone)
    assert moe(x[:0]).shape == (0, 4)
    with pytest.raises(ConfigError, match="a single number"):
        moe(torch.ones(()))


def test_rows_have_the_type_that_linears_would_compute_in() -> None:
    narrow, wide, widest = (torch.ones(2, 3, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float64))
    assert rows_for(wide, wide) is wide
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rows_for(wide, wide).dtype == torch.bfloat16
        assert rows_for(narrow, wide) is narrow
        assert rows_for(widest, widest) is widest, "autocast never touches float64"
    for x, weight in ((narrow, wide), (wide, narrow), (wide, widest)):
        with pytest.raises(ConfigError, match="or give both one type"):
            rows_for(x, weight)
