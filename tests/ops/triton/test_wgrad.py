"""Weight gradients of groups of rows, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references, errors_of

pytest.importorskip("triton")

from moeclipse.ops.triton import wgrad


@pytest.mark.parametrize("gather", ["none", "dy", "x"])
@pytest.mark.parametrize("add", [True, False])
def test_sums_equal_the_reference(gather: str, add: bool) -> None:
    assert_equal_references("wgrad", f"wgrad unused {gather} add={add}")


def test_no_way_through_the_rows_changes_the_sum() -> None:
    assert_equal_references("wgrad")
    names = " ".join(errors_of("wgrad"))
    assert all(word in names for word in ("flatten", "swap", "ahead", "per_sm"))


def test_pointers_give_the_same_sums() -> None:
    assert_equal_references("wgrad through pointers")
    names = " ".join(errors_of("wgrad through pointers"))
    words = (
        "pointers",
        "flatten",
        "swap",
        "ahead",
        "per_sm",
        " x ",
        " dy ",
        " none ",
        "add=True",
        "add=False",
    )
    assert all(word in names for word in words)


def test_every_kernel_ran() -> None:
    assert_all_ran(wgrad, "wgrad")
