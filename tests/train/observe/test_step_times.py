"""Where the time of a step went, across ranks whose clocks differ."""

from __future__ import annotations

import pytest

from moeclipse.comm.async_ops.record import StepStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.report.intervals import split_step
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.observe.step_times import gather_splits, mean_times, split_of


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


def of_all(mesh: Mesh) -> dict[str, list[float]]:
    window = (0.0, 2.0 + mesh.rank)
    return gather_splits(
        split_step(window, compute=[(0.0, 1.5)], waits=[], transfers=[]), mesh, 7 + mesh.rank
    )


def test_every_rank_has_the_times_of_all() -> None:
    for found in run_ranks(2, of_all):
        assert found["step_ms"] == pytest.approx([2000.0, 3000.0])
        assert found["compute_ms"] == pytest.approx([1500.0, 1500.0])
        assert found["rows"] == [7, 8]


def test_hidden_time_is_a_part_of_communication() -> None:
    found = mean_times({"comm_ms": [10.0, 30.0], "exposed_ms": [4.0, 6.0]})
    assert (found["comm_ms"], found["hidden_ms"], found["hidden_fraction"]) == (20.0, 15.0, 0.75)
    assert mean_times({"comm_ms": [0.0], "exposed_ms": [0.0]})["hidden_fraction"] == 0.0
