"""Digests in one read, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_all_ran, errors_of

pytest.importorskip("triton")

from moeclipse.ops.triton import digest


def test_the_number_of_the_reference() -> None:
    assert not any(errors_of("digest", "digest ").values())


def test_every_kernel_ran() -> None:
    assert_all_ran(digest, "digest")
