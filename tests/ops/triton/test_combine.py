"""Weighted sums of a token's rows, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import combine


def test_sums_equal_the_reference() -> None:
    assert_equal_references("combine", "combine 4", "combine 4 weighted", "combine 20 weighted")


def test_every_kernel_ran() -> None:
    assert_all_ran(combine, "combine")
