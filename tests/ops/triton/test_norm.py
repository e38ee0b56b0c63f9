"""RMSNorm in one pass, with the residual sum and both gradients, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import norm


@pytest.mark.parametrize("what", ["norm alone", "norm sum", "norm beside"])
def test_one_pass_equals_the_reference(what: str) -> None:
    assert_equal_references("norm", what)


def test_every_kernel_ran() -> None:
    assert_all_ran(norm, "norm")
