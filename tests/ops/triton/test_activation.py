"""Activations of plain rows and their gradients, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.activation import ACTIVATIONS
from moeclipse.ops.triton import activation


@pytest.mark.parametrize("kind", ["", "gradient ", "again ", "by autograd "])
def test_one_pass_equals_the_reference(kind: str) -> None:
    assert_equal_references("activation", *(f"activation {kind}{name}" for name in ACTIVATIONS))


def test_every_kernel_ran() -> None:
    assert_all_ran(activation, "activation")
