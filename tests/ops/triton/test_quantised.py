"""Frozen matrices are decoded with the references' bits, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, errors_of

pytest.importorskip("triton")

from moeclipse.ops.triton import quantised


@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "fp8"])
def test_the_bits_of_the_reference(kind: str) -> None:
    assert not any(errors_of("quantised", f"quantised {kind} ").values())


def test_every_kernel_ran() -> None:
    assert_all_ran(quantised, "quantised")
