"""Sums over memory that ranks share, by the kernels, through Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import assert_peers_ran

pytest.importorskip("triton")

from moeclipse.ops.triton import peer_reduce


@pytest.mark.peer_memory
def test_sums_parts_and_norms_on_three_ranks() -> None:
    """What is inline assembly is replaced there: to look at a word, and at the clock."""
    assert_peers_ran(peer_reduce, without=["poll", "clock"])
