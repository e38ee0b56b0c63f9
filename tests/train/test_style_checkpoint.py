"""Biases and activations through training and checkpoints: any layout, and no other style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

STYLE = {"moe.activation": "relu2", "moe.expert_bias": True}


def small(**changes: Any) -> TrainConfig:
    values = {
        "model.num_layers": 2,
        "model.d_model": 32,
        "model.head_dim": 8,
        "model.dtype": "float64",
        "moe.d_ff": 24,
        "moe.num_shared_experts": 1,
        "data.seq_len": 16,
        "data.batch_size": 4,
        "run.steps": 6,
    }
    return with_values(TrainConfig(), {**values, **changes})


def train(mesh: Mesh, folder: Path) -> list[float]:
    """Losses of four steps; a checkpoint is written before the third."""
    learner = Learner(small(**STYLE), mesh)
    losses = []
    for step in range(4):
        if step == 2:
            learner.save(folder, step)
        losses.append(learner.step(step)["loss"])
    biases = [p for name, p in learner.model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 8
    assert all(bias.abs().sum() > 0 for bias in biases)
    return losses


def resume(mesh: Mesh, folder: Path, style: dict[str, Any]) -> list[float]:
    learner = Learner(small(**style), mesh)
    first = learner.load(Checkpoint.open(next(folder.glob("step*")), mesh))
    return [learner.step(step)["loss"] for step in range(first, 4)]


def test_a_run_with_biases_resumes_in_another_layout(tmp_path: Path) -> None:
    expected = run_alone(train, tmp_path / "one")
    found = run_ranks(2, train, tmp_path / "two")[0]
    assert difference(found, expected) <= 1e-12
    resumed = run_alone(resume, tmp_path / "two", STYLE)
    assert difference(resumed, expected[2:]) <= 1e-12
    with pytest.raises(AssertionError, match=r"moe\.activation is 'relu2' in the checkpoint"):
        run_alone(resume, tmp_path / "one", {})
