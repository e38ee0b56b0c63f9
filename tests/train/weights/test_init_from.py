"""A new run that begins from another's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure
from tiny_models import write_tiny

from moeclipse.cli.main import main
from moeclipse.cli.train import init_problems
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.hf.folder import HfFolder
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.hugging_face import load_folder
from moeclipse.train.weights.init_from import load_weights_of

STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:3000])
    return str(path)


def small(corpus: str, **changes: Any) -> TrainConfig:
    return configure(corpus, **{"model.num_kv_heads": 2, "model.num_layers": 2, **changes})


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner.model.named_parameters()}


def train_and_save(mesh: Mesh, config: TrainConfig, run: str) -> dict[str, torch.Tensor]:
    learner = Learner(config, mesh)
    for step in range(STEPS):
        learner.step(step)
    learner.save(Path(run) / "checkpoints", STEPS)
    return weights(learner)


@pytest.fixture(scope="module")
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """A run of one rank, and its weights at the end."""
    folder = tmp_path_factory.mktemp("run")
    return str(folder), run_alone(train_and_save, small(corpus), str(folder))


def begin(mesh: Mesh, config: TrainConfig, path: str) -> tuple[dict[str, torch.Tensor], int, float]:
    learner = Learner(config, mesh)
    load_weights_of(path, learner, PatientRanks(mesh, 30.0))
    begun = weights(learner)
    return begun, learner.optim.updates, learner.step(0)["loss"]


@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_weights_are_taken_and_nothing_else(run: tuple[str, Any], corpus: str, what: str) -> None:
    path, expected = run
    folder = path if what == "run" else f"{path}/checkpoints/step-{STEPS:08d}"
    found, updates, loss = run_alone(begin, small(corpus), folder)
    assert updates == 0
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for axes in ({}, {"tp": 2}, {"pp": 2}, {"dp": 2}):
        losses = [loss for _, _, loss in run_ranks(2, begin, small(corpus), folder, **axes)]
        assert losses == pytest.approx([loss] * 2, rel=1e-12), axes


def test_another_type_is_no_other_model(run: tuple[str, Any], corpus: str) -> None:
    found, _, _ = run_alone(begin, small(corpus, **{"model.dtype": "float32"}), run[0])
    for name, value in run[1].items():
        assert torch.equal(found[name], value.float()), name


def refused(mesh: Mesh, config: TrainConfig, path: str) -> str:
    learner = Learner(config, mesh)
    before = weights(learner)
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        load_weights_of(path, learner, PatientRanks(mesh, 30.0))
    assert all(torch.equal(value, before[name]) for name, value in weights(learner).items())
    return str(raised.value)


def test_another_model_is_refused_by_name(run: tuple[str, Any], corpus: str, tmp_path: Path) -> None:
    wider = with_values(small(corpus), {"moe.d_ff": 24})
    for text in run_ranks(2, refused, wider, run[0]):
        assert f"run.init_from ({run[0]}): moe.d_ff is " in text
    (tmp_path / "checkpoints").mkdir()
    text = run_alone(refused, small(corpus), str(tmp_path))
    assert text == f"run.init_from ({tmp_path}): the run has no whole checkpoint"


def from_folder(mesh: Mesh, config: TrainConfig) -> float:
    learner = Learner(config, mesh)
    load_folder(learner, PatientRanks(mesh, 30.0))
    return float(learner.step(0)["loss"])


def test_a_converted_model_begins_like_its_folder(corpus: str, tmp_path: Path) -> None:
    model, converted = str(tmp_path / "model"), str(tmp_path / "converted")
    run_alone(lambda _: write_tiny("qwen3_moe", Path(model), vocab_size=256))
    assert main(["convert", model, converted, "--no-tokenizer"]) == 0
    shape = with_values(small(corpus), HfFolder.open(model).values)
    expected = run_alone(from_folder, with_values(shape, {"model.from_hf": model}))
    for _, _, loss in run_ranks(2, begin, shape, converted):
        assert loss == pytest.approx(expected, rel=1e-12)
    text = run_alone(refused, with_values(shape, {"model.num_layers": 1}), converted)
    assert f"model.num_layers (1) contradicts {converted}/config.json" in text


def test_what_can_be_told_before_a_rank_starts(tmp_path: Path) -> None:
    assert list(init_problems("", "off", "")) == []
    assert list(init_problems(str(tmp_path), "auto", "")) == []
    (told,) = init_problems(str(tmp_path / "gone"), "off", "")
    assert told.endswith("no such folder; give a checkpoint's, a run's or a model's")
    (told,) = init_problems(str(tmp_path), "off", "model")
    assert "both name weights" in told
    (told,) = init_problems(str(tmp_path), "runs/x", "")
    assert "leave one out" in told
