"""Backward of the activation, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import expert_backward


def test_hidden_gradients_equal_the_reference() -> None:
    assert_equal_references("experts", "dh ", "scaled ", "dscore ")


def test_every_kernel_ran() -> None:
    assert_all_ran(expert_backward, "experts")
