"""Forms of optimizer state that lose nothing: the bits are those of fp32, and a run goes on from either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_optim_states import checkpoint_in, config_of, found_in

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.ops.low_bits import LowBits
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.optim.shard_state import ShardState
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

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


def sizes(mesh: Mesh) -> dict[tuple[str, str], float]:
    """Bytes of a parameter of the first bucket, a matrix with rows of 16."""
    found = {}
    for master in ("fp32", "low-bits", "none"):
        for moments in ("fp32", "bf16", "8bit"):
            changes = {"optim.master": master, "optim.state": moments}
            optim = Learner(config_of(changes), mesh).optim
            pieces = sum(piece.num_bytes for piece in optim.pieces())
            assert pieces <= optim.num_bytes <= 1.01 * pieces, "known before a piece is made"
            state = next(s for s in optim.states if s.bucket.decay)
            found[master, moments] = sum(tensor.nbytes for tensor in state.tensors().values()) / len(state)
    return found


def test_bytes_of_a_parameter() -> None:
    found = run_alone(sizes)
    masters = {"fp32": 4, "low-bits": 2 + 1 / 8, "none": 0}
    moments = {"fp32": 8, "bf16": 4, "8bit": 2 * (1 + 1 / 16)}
    expected = {(a, b): masters[a] + moments[b] for a in masters for b in moments}
    assert found == pytest.approx(expected)


def put_and_get(mesh: Mesh) -> None:
    learner = Learner(config_of({"optim.master": "low-bits", "optim.state": "8bit"}), mesh)
    state: ShardState = next(state for state in learner.optim.states if state.bucket.decay)
    wide = torch.randn(len(state))
    state.put("weight", wide)
    state.bucket.store(wide)
    assert torch.equal(state.values("weight"), wide)
    assert torch.equal(state.values("weight", 3, 11), wide[3:11])
    assert state.type_of("weight") == torch.float32
    assert torch.equal(state.bucket.weights(torch.bfloat16), wide.bfloat16())
    for kind in ("adam_m", "adam_v"):
        state.put(kind, wide.abs())
        values = state.values(kind)
        assert ((values - wide.abs()).abs() <= wide.abs().view(-1, 16).amax() / 8).all()
        assert state.type_of(kind) == values.dtype == torch.bfloat16
        assert state.room(kind).dtype == torch.float32
        state.put(kind, values)
        assert torch.equal(state.values(kind), values), "what it has stays"
        assert torch.equal(state.values(kind, 5, 40), values[5:40])
    vectors = next(state for state in learner.optim.states if not state.bucket.decay)
    assert vectors.adam_m.dtype == torch.float32


def on_and_on(mesh: Mesh, changes: dict[str, Any], folder: Path) -> None:
    """Twelve steps; six and six from a checkpoint; six from it with wide moments, and from these back."""
    eight = {**changes, "optim.state": "8bit", "integrity.every": 2}
    learner = Learner(config_of(eight), mesh)
    advance(learner, 0, 6)
    learner.save(folder / "half", 6)
    advance(learner, 6, 12)
    learner.save(folder / "whole", 12)
    for name, way, start in (
        ("resumed", eight, "half"),
        ("wide", {**changes, "optim.state": "fp32"}, "half"),
        ("back", eight, "wide"),
    ):
        learner = Learner(config_of(way), mesh)
        learner.load(Checkpoint.open(checkpoint_in(folder / start), OneRank()))
        first = 12 if start == "wide" else 6
        advance(learner, first, 12)
        learner.save(folder / name, 12)


@pytest.mark.parametrize("layout", [pytest.param("dp", marks=pytest.mark.full), "moving"])
def test_moments_in_eight_bits_go_on_as_they_were(layout: str, tmp_path: Path) -> None:
    axes, changes = LAYOUTS[layout]
    run_ranks(2, on_and_on, changes, tmp_path, **axes)
    expected, resumed = found_in(tmp_path / "whole"), found_in(tmp_path / "resumed")
    assert not [name for name in expected if not torch.equal(resumed[name], expected[name])]
    wide, back = found_in(tmp_path / "wide"), found_in(tmp_path / "back")
    for name, value in back.items():
        if name.startswith("weight/"):
            assert torch.equal(value, wide[name])
        elif value.dtype == torch.bfloat16:
            assert wide[name].dtype == torch.float32
            assert (value - wide[name]).norm() <= 0.05 * wide[name].norm(), "rounded to the nearest"


def near_fp32(mesh: Mesh) -> dict[str, list[float]]:
    found = {}
    for moments in ("fp32", "8bit"):
        changes = {"optim.state": moments, "model.dtype": "float32", "run.steps": 60, "optim.lr": 3e-3}
        learner = Learner(with_values(load(preset="tiny"), changes), mesh)
        found[moments] = [learner.step(step)["loss"] for step in range(60)]
    return found


@pytest.mark.full
def test_losses_with_eight_bits_stay_beside_those_of_fp32() -> None:
    found = run_ranks(1, near_fp32, deadline_s=1200.0)[0]
    last = {name: sum(curve[-10:]) / 10 for name, curve in found.items()}
    assert last["fp32"] < found["fp32"][0] - 1.5
    assert last["8bit"] == pytest.approx(last["fp32"], abs=0.05)
    assert found["8bit"] != found["fp32"]


def test_values_are_what_was_put() -> None:
    run_alone(put_and_get)
