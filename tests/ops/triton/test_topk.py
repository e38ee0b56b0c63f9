"""The gate in one pass, and its gradient, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import topk


@pytest.mark.parametrize("what", ["gate scores", "gate ids", "gate gradient"])
def test_the_gate_equals_the_reference(what: str) -> None:
    """Logits are rounded, so that some are equal: the smaller id comes first."""
    assert_equal_references("gate", what)


def test_every_kernel_ran() -> None:
    assert_all_ran(topk, "gate")
