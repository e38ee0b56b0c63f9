"""Numbers picked by index, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import pick


def test_one_launch_equals_the_reference() -> None:
    assert_equal_references("pick", "pick ")


def test_every_kernel_ran() -> None:
    assert_all_ran(pick, "pick")
