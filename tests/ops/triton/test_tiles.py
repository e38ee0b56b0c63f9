"""Tiles of rows and columns that matrix kernels walk over, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import tiles


def test_tiles_cover_every_row_and_column_once() -> None:
    """Widths of 40 and 24 leave tiles of 32 partly filled; empty experts leave some out."""
    assert_equal_references("experts", "h empty 40x24", "y one takes all 40x24", "dx unused 40x24")


def test_every_function_ran() -> None:
    assert_all_ran(tiles, "experts", "wgrad")
