"""Products of rows with the weights of their experts, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references, errors_of

pytest.importorskip("triton")

from moeclipse.ops.triton import expert_forward


@pytest.mark.parametrize("form", ["experts", "experts through pointers"])
@pytest.mark.parametrize("kind", ["h ", "a ", "y ", "dx ", "u "])
def test_products_equal_the_reference(kind: str, form: str) -> None:
    assert_equal_references(form, kind)


@pytest.mark.parametrize("form", ["experts", "experts through pointers"])
def test_rows_are_gathered_or_taken_as_they_lie_with_and_without_bias(form: str) -> None:
    names = " ".join(errors_of(form, "h "))
    assert all(word in names for word in ("gathered", "as they lie", "bias", "64x32", "rank 8", "rank 72"))


def test_every_kernel_ran() -> None:
    assert_all_ran(expert_forward, "experts")
