"""Forms of optimizer state that lose nothing: the bits are those of fp32, and a run goes on from either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_optim_states import checkpoint_in, config_of, found_in

from moeclipse.comm.mesh import Mesh
from moeclipse.ops.low_bits import LowBits
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.learner import Learner
from moeclipse.train.shard_state import ShardState

HALF, STEPS = 16, 20
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "moving": ({}, {"placement.planner": "greedy", "placement.every": 3, "placement.slots_per_rank": 3}),
    "pp": ({"pp": 2}, {"parallel.pp": 2, "optim.accumulate": 2}),
}


def train_both(mesh: Mesh, changes: dict[str, Any], folder: Path) -> list[Any]:
    """With an fp32 master and with low bits: all steps, and the last ones from the other's; placements."""
    for master, other in (("fp32", "low-bits"), ("low-bits", "fp32")):
        learner = made(mesh, {**changes, "optim.master": master})
        advance(learner, 0, HALF)
        learner.save(folder / f"half {master}", HALF)
        advance(learner, HALF, STEPS)
        learner.save(folder / f"{master}", STEPS)
        learner = made(mesh, {**changes, "optim.master": other})
        learner.load(Checkpoint.open(checkpoint_in(folder / f"half {master}"), OneRank()))
        advance(learner, HALF, STEPS)
        learner.save(folder / f"{other} from {master}", STEPS)
    return [placed.placement.slots for placed in learner.placement.layers]


def made(mesh: Mesh, changes: dict[str, Any]) -> Learner:
    learner = Learner(config_of({"integrity.every": 5, **changes}), mesh)
    low = changes["optim.master"] == "low-bits"
    assert all(isinstance(state.weight, LowBits) is low for state in learner.optim.states)
    return learner


def advance(learner: Learner, first: int, last: int) -> None:
    for step in range(first, last):
        learner.step(step)


def assert_equal(folder: Path, *ways: str) -> None:
    expected = found_in(folder / "fp32")
    assert len(expected) > 30
    assert {value.dtype for value in expected.values()} == {torch.float32}
    for way in ways:
        found = found_in(folder / way)
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])], way


@pytest.mark.parametrize("layout", [pytest.param("dp", marks=pytest.mark.full), "moving", "pp"])
def test_low_bits_train_as_an_fp32_master(layout: str, tmp_path: Path) -> None:
    axes, changes = LAYOUTS[layout]
    slots = run_ranks(2, train_both, changes, tmp_path, **axes)[0]
    if layout == "moving":
        start = config_of(changes).placement.start(4, 2, 0)
        assert slots != [start.slots], "experts moved"
    assert_equal(tmp_path, "low-bits", "low-bits from fp32", "fp32 from low-bits")


@pytest.mark.full
def test_low_bits_are_averaged_as_an_fp32_master(tmp_path: Path) -> None:
    """Replicas that step alone; a checkpoint has the moments of one of them, so no run goes on exactly."""
    changes = {"placement.slots": ((0, 1, 2), (3, 2, 0)), "placement.reduce": "fedavg"}
    run_ranks(2, train_both, changes, tmp_path)
    assert_equal(tmp_path, "low-bits")


def sizes(mesh: Mesh) -> dict[str, float]:
    found = {}
    for master in ("fp32", "low-bits", "none"):
        learner = Learner(config_of({"optim.master": master}), mesh)
        kept = [tensor for state in learner.optim.states for tensor in state.tensors().values()]
        numel = sum(len(state) for state in learner.optim.states)
        found[master] = sum(tensor.nbytes for tensor in kept) / numel
    return found


def test_bytes_of_a_parameter() -> None:
    """Moments take eight of them."""
    found = run_alone(sizes)
    assert found["fp32"] == 12
    assert found["none"] == 8
    assert found["low-bits"] == pytest.approx(10 + 1 / 8, rel=1e-3)


def put_and_get(mesh: Mesh) -> None:
    learner = Learner(config_of({"optim.master": "low-bits"}), mesh)
    state: ShardState = learner.optim.states[0]
    wide = torch.randn(len(state))
    state.put("weight", wide)
    state.bucket.store(wide)
    assert torch.equal(state.values("weight"), wide)
    assert torch.equal(state.values("weight", 3, 11), wide[3:11])
    assert state.type_of("weight") == torch.float32
    assert torch.equal(state.bucket.weights(torch.bfloat16), wide.bfloat16())


def test_values_are_what_was_put() -> None:
    run_alone(put_and_get)
