"""The counting sort that groups rows, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import grouping


def test_tables_equal_those_of_a_stable_sort() -> None:
    kinds = [f"grouping {kind} " for kind in ("uniform", "skewed", "empty", "one takes all", "unused")]
    assert_equal_references("grouping", *kinds)


def test_every_kernel_ran() -> None:
    assert_all_ran(grouping, "grouping")
