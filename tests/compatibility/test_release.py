"""A run of version 0.1, stored in tests/data, is continued by this version and goes where it went then.

The run was trained by version 0.1 on two ranks: dense and MoE layers, shared expert, biases, a gate with a
selection bias, memory, slots for a planner. `continued.json` holds what version 0.1 made of it in two more
steps; of each tensor its norm, and its product with 1, 2, 3, ... over the norm of that.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from release import FOLDER

from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import from_table, with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.core.toml import parse_toml
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load
from moeclipse.train.run.trainer import train
from moeclipse.train.step.learner import Learner

EXPECTED: dict[str, Any] = json.loads((FOLDER / "continued.json").read_text())
BOUND = 1e-12


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the user of version 0.1 has the run `old`."""
    folder = tmp_path / "user"
    shutil.copytree(FOLDER, folder)
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return folder / "old"


def check_tensors(path: Path) -> None:
    checkpoint = Checkpoint.open(path, OneRank())
    assert set(EXPECTED["tensors"]) <= set(checkpoint.names)
    for name, (norm, ramp) in EXPECTED["tensors"].items():
        found = checkpoint.read(name).double().flatten()
        weights = torch.arange(1, len(found) + 1, dtype=torch.float64)
        assert abs(found.norm() - norm) <= BOUND * norm, name
        assert abs((found * weights).sum() / weights.norm() - ramp) <= BOUND * norm, name


def trained(_mesh: Mesh, config: TrainConfig) -> str:
    checkpoint: str = train(config, resume="auto")["checkpoint"]
    return checkpoint


def test_the_run_goes_on(old: Path) -> None:
    config = with_values(load(old / "config.toml"), {"run.steps": 4})
    checkpoint = run_alone(trained, config)
    lines = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["loss"] for line in lines] == pytest.approx(EXPECTED["losses"], rel=BOUND)
    assert [line["grad_norm"] for line in lines] == pytest.approx(EXPECTED["grad_norms"], rel=BOUND)
    assert checkpoint == "old/checkpoints/step-00000004"
    check_tensors(old / "checkpoints" / "step-00000004")


def go_on(mesh: Mesh, config: TrainConfig, path: str) -> list[float]:
    learner = Learner(config, mesh)
    start = learner.load(Checkpoint.open(path, mesh))
    losses = [float(learner.step(step)["loss"]) for step in range(start, start + 2)]
    learner.save(Path("again"), start + 2)
    return losses


def test_two_ranks_go_on(old: Path) -> None:
    config = with_values(load("my.toml"), {"run.steps": 4})
    for losses in run_ranks(2, go_on, config, str(old / "checkpoints" / "step-00000002")):
        assert losses == pytest.approx(EXPECTED["losses"][2:], rel=BOUND)
    check_tensors(Path("again/step-00000004"))


def test_a_key_that_came_later_was_at_its_default(old: Path) -> None:
    learner = Learner(load("my.toml"), Mesh.single())
    checkpoint = Checkpoint.open(old / "checkpoints" / "step-00000002", OneRank())
    model = checkpoint.state["fingerprint"]["model"]
    del model["norm_eps"]
    assert learner.load(checkpoint) == 2
    del model["d_model"]
    with pytest.raises(CheckpointError, match=r"model\.d_model is 128 in the checkpoint, 6 in this run"):
        learner.load(checkpoint)


def test_the_users_file_still_means_the_same(old: Path, capsys: pytest.CaptureFixture) -> None:
    # When a run is saved, is checked, looks at its placement, runs a layer again to save memory, or how its
    # rows travel, is no part of what it learns: 0.1 saved at the end, looked every 50 steps, ran nothing
    # again and exchanged rows in one go, unless told otherwise.
    now = {"checkpoint.every": "auto", "placement.every": 10, "moe.schedule": "auto"}
    now |= {"moe.transport": "auto", "pipeline.overlap": "auto", "pipeline.recompute": "auto"}
    now |= {"integrity.every": "auto"}
    then = with_values(load(old / "config.toml"), now)
    assert load("my.toml") == then
    assert main(["train", "my.toml", "--resume", "auto", "--ranks", "2", "--print-config"]) == 0
    text = capsys.readouterr().out
    assert from_table(TrainConfig, parse_toml(text, "printed"), "printed") == load("my.toml")


def test_nothing_stored_names_a_machine() -> None:
    """Paths in it are relative, as the user gave them."""
    for file in FOLDER.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for word in (b"/home", b"/tmp", b"/root", b"/work", b"localhost"):
                assert word not in data, (file.name, word)
