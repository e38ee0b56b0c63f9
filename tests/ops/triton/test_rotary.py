"""Rotary positions with norms of heads, and their gradients, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import rotary


@pytest.mark.parametrize("what", ["turn (", "turn normed ("])
def test_one_launch_equals_the_reference(what: str) -> None:
    assert_equal_references("turn", what)


def test_every_kernel_ran() -> None:
    assert_all_ran(rotary, "turn")
