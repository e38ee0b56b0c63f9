"""Activations inside kernels: value and slope, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, errors_of

pytest.importorskip("triton")

from moeclipse.ops.activation import ACTIVATIONS
from moeclipse.ops.triton import activations


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_slopes_are_those_of_the_reference(activation: str) -> None:
    """`a` is the value, `dh` holds the slope."""
    found = errors_of("experts", "a ", "dh ")
    mine = [value for name, value in found.items() if activation in name.split()]
    assert len(mine) >= 2
    assert max(mine) < 2e-3, found


def test_every_function_ran() -> None:
    assert_all_ran(activations, "experts")
