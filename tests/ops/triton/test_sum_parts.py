"""Parts added up in one order, stored or added, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import sum_parts


def test_one_launch_equals_the_reference() -> None:
    assert_equal_references("parts", "parts ")


def test_every_kernel_ran() -> None:
    assert_all_ran(sum_parts, "parts")
