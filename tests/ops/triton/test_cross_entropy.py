"""Numbers of a row of logits and the gradient of the loss, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import cross_entropy


@pytest.mark.parametrize("what", ["loss largest", "loss sum", "loss target", "loss gradient"])
def test_one_pass_equals_the_reference(what: str) -> None:
    assert_equal_references("loss", what)


def test_every_kernel_ran() -> None:
    assert_all_ran(cross_entropy, "loss")
