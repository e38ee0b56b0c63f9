"""What replicas cost beside their rows: a fixed part, bytes per second, and nothing of the layer changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parity import make

from moeclipse.balance.objective import PlacementCosts
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.tune import replica_price, stopwatch
from moeclipse.moe.tune.replica_price import PARAMETERS, sync, sync_price
from moeclipse.moe.tune.stopwatch import Timing
from moeclipse.testing.run_ranks import run_ranks


def on_a_clock(mesh: Mesh, held: int) -> tuple[float, float]:
    """With nothing 2 ms, with a copy 6 ms, for copying an expert 0.5 ms; rank 0 is twice as fast."""
    seconds = [(1 + mesh.rank) / 2 * each for each in (2e-3, 6e-3, 5e-4)]

    def timed(work: Any, device: Any) -> Timing:
        work()
        return Timing(seconds.pop(0), 0.0)

    stopwatch.timed = timed
    return sync_price(1001, torch.float32, held, mesh.experts, mesh)


@pytest.mark.parametrize("held", [0, 1, 4])
def test_a_fixed_part_and_a_slope_are_found(held: int) -> None:
    one, other = run_ranks(2, on_a_clock, held)
    assert one == other, "whoever decides from them decides alike"
    fixed, bandwidth = one
    assert fixed == pytest.approx(2e-3 + max(held - 1, 0) * 5e-4)
    assert bandwidth == pytest.approx(PARAMETERS * 501 * (4 + 4) / 4e-3)


def around(mesh: Mesh, count: int) -> tuple[list[float], list[float]]:
    weights = [torch.zeros(4) for _ in range(PARAMETERS)]
    grads = [torch.full((4,), float(1 + mesh.rank)) for _ in range(PARAMETERS)]
    sync(weights, grads, count, mesh.experts, mesh)
    return weights[0].tolist(), grads[1].tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_copy_really_goes_to_the_next_rank_and_back(ranks: int) -> None:
    """A rank lays gradients into weights and sends them back: its own and those of the rank before it."""
    for count in (0, 3):
        for rank, (weights, grads) in enumerate(run_ranks(ranks, around, count)):
            # What comes back was copied before the parts of others were added to it.
            next_one = 1 + (rank + 1) % ranks
            assert weights == [float(next_one)] * count + [float(1 + rank)] * (4 - count)
            assert grads == [float(1 + rank)] * 4, "nobody's gradients are touched"


def alone(mesh: Mesh) -> tuple[tuple[float, float], float]:
    moe = make(GateConfig(top_k=2), 4, 0, mesh)
    return sync_price(100, torch.float32, 4, mesh.experts, mesh), moe.measure_costs().sync


def test_one_rank_has_no_replicas() -> None:
    assert run_ranks(1, alone) == [((0.0, 0.0), 0.0)]


def whole(mesh: Mesh) -> tuple[bool, dict[str, float]]:
    moe = make(GateConfig(top_k=2), 4, 0, mesh)
    before = [weight.detach().clone() for weight in moe.experts.weights]
    found = moe.measure_costs()
    same = all(map(torch.equal, before, moe.experts.weights))
    untouched = all(weight.grad is None for weight in moe.experts.weights)
    return same and untouched, vars(found)


def test_a_layer_measures_it_with_its_other_costs() -> None:
    (same, one), (other_same, other) = run_ranks(2, whole)
    assert same
    assert other_same
    assert one == other
    assert one["sync"] > 0
    priced = {**one, **dict.fromkeys(("row_forward", "row_backward", "bandwidth", "link"), 1.0)}
    costs = PlacementCosts.from_measured({**priced, "sync_bandwidth": 5.0}, every=50)
    assert costs.replicas_seconds == one["sync"]
    assert costs.copy_bandwidth == 5.0
    assert replica_price.WHERE.startswith("probe")
