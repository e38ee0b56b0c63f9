"""Plans in training: made beside it, taken by all ranks or by none."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure, corpus, state_after_load  # noqa: F401  (a fixture)
from test_model_placement import RANDOM

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.moe import migrate
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks, run_ranks_raw
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.learner import Learner
from moeclipse.train.placement import background_plan

PLANNED = {**RANDOM, "placement.planner": "incremental", "placement.start_step": 2, "placement.every": 4}


def planned(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list[float], int, list[str], list[int]]:
    learner = Learner(config, mesh)
    losses, notes = [], []
    for step in range(steps):
        record = learner.step(step)
        losses.append(record["loss"])
        notes += record.get("notes", [])
    replicas = [placed.placement.num_replicas for placed in learner.placement.layers]
    return losses, learner.placement.plans_taken, notes, replicas


@pytest.mark.parametrize("planner", ["wrap_fill", pytest.param("incremental", marks=pytest.mark.full)])
def test_planned_training_has_the_same_losses(planner: str, corpus: str) -> None:  # noqa: F811
    expected, *_ = run_alone(planned, configure(corpus), 8)
    config = configure(corpus, **{**PLANNED, "placement.planner": planner, "integrity.every": 1})
    for losses, plans, notes, replicas in run_ranks(4, planned, config, 8):
        assert difference(torch.tensor(losses), torch.tensor(expected)) <= 1e-12
        assert plans >= 1, notes
        if planner == "wrap_fill":
            assert min(replicas) > 5, "spare slots hold replicas"
            assert any(" transfers" in note for note in notes)


def with_slow_planner(mesh: Mesh, config: TrainConfig) -> tuple[list[str], int, int]:
    """A planner that does not answer before three more steps have been made, and then fails."""
    may_answer = threading.Event()

    def slow(*_: Any) -> Placement:
        may_answer.wait()
        raise RuntimeError("no licence")

    background_plan.plan = slow
    learner = Learner(config, mesh)
    notes = [note for step in range(4) for note in learner.step(step).get("notes", [])]
    assert not notes
    left_out = learner.placement.planner.left_out
    may_answer.set()
    step = 4
    while not notes:
        notes = learner.step(step).get("notes", [])
        step += 1
    return notes, learner.placement.plans_taken, left_out


def test_training_does_not_wait_for_a_planner_and_survives_its_failure(corpus: str) -> None:  # noqa: F811
    config = configure(corpus, **{**PLANNED, "placement.start_step": 1, "placement.every": 1})
    for notes, taken, left_out in run_ranks(2, with_slow_planner, config):
        assert notes == ["the planner asked at step 0 failed: no licence; experts stay"]
        assert taken == 0
        assert left_out == 3, "plans that were due meanwhile are left out, and counted"


def with_bad_plan(mesh: Mesh, config: TrainConfig, how: str) -> tuple[list[str], int, bool]:
    plain = background_plan.plan

    def bad(*args: Any) -> Any:
        good = plain(*args)
        rows = [list(row) for row in good.slots]
        rows[0].append(-1)
        return type("Bad", (), {"slots": rows, "primary": good.primary})()

    if how == "slots":
        background_plan.plan = bad
    learner = Learner(config, mesh)
    before = [placed.placement for placed in learner.placement.layers]
    if how == "disagree" and mesh.rank == 1:
        placement = before[0]
        primary = tuple(placement.holders[e][-1] for e in range(placement.num_experts))
        other = Placement((placement.slots[0], placement.slots[1][::-1]), primary)
        object.__setattr__(learner.placement.layers[0].ownership, "placement", other)
    proposal, note = None, ""
    averages = run_a_step(learner)
    learner.placement.planner.request(0, learner.placement._requests(0, averages))
    while learner.placement.planner.pending is not None:
        current = [placed.placement for placed in learner.placement.layers]
        proposal, note = learner.placement.planner.poll(current)
        time.sleep(0.01)
    return [note], learner.placement.plans_taken, proposal is None


def run_a_step(learner: Learner) -> Any:
    learner.backward(0)
    from moeclipse.balance.load import LoadAverage

    counts = torch.stack([layer.load_E for layer in learner.layers])[:, None].repeat(1, 2, 1)
    for bucket in learner.buckets:
        bucket.reduced()
    return LoadAverage().add(counts.numpy())


@pytest.mark.parametrize(
    ("how", "reason"), [("slots", "slots on its ranks, but there are"), ("disagree", "ranks disagree")]
)
def test_a_plan_that_does_not_fit_moves_nobody(how: str, reason: str, corpus: str) -> None:  # noqa: F811
    for notes, taken, refused in run_ranks(2, with_bad_plan, configure(corpus, **PLANNED), how):
        assert refused
        assert taken == 0
        assert reason in notes[0], notes
        assert notes[0].startswith("a plan was refused, experts stay")


def dies_while_moving(mesh: Mesh, config: TrainConfig, folder: str) -> str:
    learner = Learner(config, mesh)
    learner.step(0)
    learner.save(Path(folder), 1)
    if mesh.rank == 1:

        def killed(*_: Any) -> list[int]:
            os._exit(9)

        migrate.header = killed
    try:
        for step in range(1, 12):
            learner.step(step)
    except CommError as error:
        return str(error)
    return ""


def test_a_rank_that_dies_while_experts_move(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    config = configure(corpus, **RANDOM)
    outcomes = run_ranks_raw(4, dies_while_moving, config, str(tmp_path), collective_deadline_s=15.0)
    assert outcomes[1] == (False, "rank 1 ended with exit code 9 and no result")
    for rank in (0, 2, 3):
        ok, told = outcomes[rank]
        assert ok, told
        assert re.match(f"rank {rank} lost rank 1 in migration of experts, layer [01]:", told), told
    found = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert len(found) == 1
    run_alone(state_after_load, configure(corpus), str(tmp_path / found[0]))


def refused(mesh: Mesh, config: TrainConfig) -> str:
    try:
        Learner(config, mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_stage_without_experts_cannot_be_planned(corpus: str) -> None:  # noqa: F811
    stages = {"model.num_layers": 4, "model.num_dense_layers": 2, "optim.accumulate": 4}
    stages |= {"pipeline.schedule": "1f1b", "placement.slots_per_rank": 5}
    config = configure(corpus, **{**PLANNED, **stages})
    for told in run_ranks(2, refused, config, pp=2):
        assert "needs a layer with experts in every stage, but rank 0 of the pipeline holds none" in told


def curve_from(mesh: Mesh, config: TrainConfig, path: str, steps: int) -> list[float]:
    learner = Learner(config, mesh)
    start = learner.load(Checkpoint.open(path, mesh))
    return [learner.step(step)["loss"] for step in range(start, start + steps)]


def planned_once(mesh: Mesh, config: TrainConfig, folder: str) -> tuple[str, list[float]]:
    """Train until a plan has been taken, save, go on for three steps."""
    learner = Learner(config, mesh)
    step = 0
    while not learner.placement.plans_taken:
        learner.step(step)
        step += 1
    path = str(learner.save(Path(folder), step))
    return path, [learner.step(step)["loss"] for step in range(step, step + 3)]


def test_a_resumed_run_repeats_the_bits_of_the_first(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    plans = {"placement.planner": "wrap_fill", "placement.start_step": 2, "placement.every": 1000}
    config = configure(corpus, **{**PLANNED, **plans, "model.dtype": "float32"})
    path, losses = run_ranks(3, planned_once, config, str(tmp_path))[0]
    assert run_ranks(3, curve_from, config, path, 3)[0] == losses
