"""Times of a step across ranks whose clocks differ."""

from __future__ import annotations

import pytest

from moeclipse.comm.flight.record import StepStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.metrics import split_of


def split(mesh: Mesh, skew: float, known: bool) -> tuple[float, float]:
    """Rank 1 launches a transfer 2 s late; its clock is `skew` ahead."""
    ahead = skew if mesh.rank == 1 else 0.0
    begun = ahead + (3.0 if mesh.rank == 1 else 1.0)
    stamps = StepStamps(
        window=(ahead, ahead + 6.0),
        compute=[(ahead, begun)],
        waits=[],
        transfers=[("world", "dispatch", begun, ahead + 5.0)],
    )
    found = split_of(stamps, mesh, -ahead if known else 0.0)
    return found.straggle, found.exposed


@pytest.mark.parametrize("skew", [0.0, 100.0, -100.0])
def test_late_ranks_are_told_from_the_wire_on_any_clock(skew: float) -> None:
    early, late = run_ranks(2, split, skew, True)
    assert early == pytest.approx((2.0, 2.0))
    assert late == pytest.approx((0.0, 2.0))
