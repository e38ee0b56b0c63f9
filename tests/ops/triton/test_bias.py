"""Sums over the rows of each expert, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import bias


def test_sums_equal_the_reference() -> None:
    assert_equal_references("bias", "group sum empty", "group sum unused")


def test_every_kernel_ran() -> None:
    assert_all_ran(bias, "bias")
