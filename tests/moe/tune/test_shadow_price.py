"""What shadows take beside their bytes, measured on all ranks together."""

from __future__ import annotations

from typing import Any

import pytest
from layer_parity import gradients, make

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.tune import probe, stopwatch
from moeclipse.moe.tune.probe import Probe
from moeclipse.moe.tune.shadow_price import to_the_next
from moeclipse.moe.tune.stopwatch import Slope, Timing
from moeclipse.testing.run_ranks import run_ranks
from probed import lend


@pytest.mark.parametrize(
    ("slots", "shadows"),
    [
        (((0, 1), (2, 3), (4,)), ((0, (1,)), (2, (2,)), (4, (0,)))),
        (((0, 1), (), (2,)), ((0, (1,)), (2, (0,)))),
        (((0, 1), (0, 2)), ((1, (1,)), (2, (0,)))),
        (((0, 1), (0, 1)), ()),
    ],
    ids=["each to the next", "a rank without experts", "a replica is there already", "all are everywhere"],
)
def test_every_rank_lends_one_expert_to_the_next(slots: Any, shadows: Any) -> None:
    assert to_the_next(Placement(slots)) == shadows


def measured(mesh: Mesh, slots: Any, clocked: bool) -> dict[str, float]:
    """As the second call measures it; by a clock on which rank r takes 1 + r times as long as rank 0."""
    more = lend("auto", schedule="blocking", chunks=1)
    moe = make(GateConfig(top_k=2), 4, 0, mesh, placement=Placement(slots), **more)
    if clocked:
        of_replicas = [0.0, 1.0, 0.0]  # what is measured before
        seconds = [*of_replicas, (1 + mesh.rank) * 0.5, (1 + mesh.rank) * 3.0]

        def timed(work: Any, device: Any) -> Timing:
            work()
            return Timing(seconds.pop(0), 0.0)

        stopwatch.timed = timed  # type: ignore[assignment]
        probe._wire_seconds = lambda *given: Timing(1e-3 + given[2] / 1e8, 0.0)  # type: ignore[assignment]
        probe._rows = lambda *_: (Slope(1e-6, 0.0), Slope(2e-6, 0.0), 0.0)  # type: ignore[assignment]
    for _ in range(2):
        gradients(moe, mesh, [6, 4])
    assert moe.schedule.probe is not None
    return vars(moe.schedule.probe)


def test_the_slowest_rank_sets_both_prices() -> None:
    one, other = run_ranks(2, measured, ((0, 1), (2, 3)), True)
    assert one == other
    assert one["look"] == 1.0
    wire = 2 * one["latency"] + (one["parameter_bytes"] + one["gradient_bytes"]) / one["bandwidth"]
    assert one["loan"] == pytest.approx((6.0 - wire) / 2)


@pytest.mark.parametrize("slots", [((0, 1, 2, 3), ()), ((0, 1), (0, 1, 2, 3))], ids=["none", "replicas"])
def test_any_placement_has_prices(slots: Any) -> None:
    one, other = run_ranks(2, measured, slots, False)
    assert one == other
    assert one["look"] > 0 or Probe(**one).unknown
    assert one["loan"] >= 0
