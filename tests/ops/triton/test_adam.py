"""AdamW and the sum of squares in one pass, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, assert_equal_references

pytest.importorskip("triton")

from moeclipse.ops.triton import adam

WHAT = ["weight", "m", "v", "rounded", "skipped", "by chance", "narrow", "low bits", "eight bits"]


@pytest.mark.parametrize("what", [*(f"adam {what}" for what in WHAT), "squares"])
def test_one_pass_equals_the_reference(what: str) -> None:
    assert_equal_references("adam", what)


def test_every_kernel_ran() -> None:
    assert_all_ran(adam, "adam")
