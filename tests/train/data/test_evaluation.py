"""Loss on text that is held out: one number in all layouts, and training does not notice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of, with_values
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.data_config import SourceConfig
from moeclipse.train.data.evaluation import Evaluation, opened_for, some_of, told_of
from moeclipse.train.run.trainer import train
from moeclipse.train.step.learner import Learner

BOUND = 1e-12
SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.head_dim": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.dtype": "float64",
    "model.init_std": 0.1,
    "model.vocab_size": 257,
    "moe.num_experts": 4,
    "moe.d_ff": 9,
    "gate.balance_loss": 0.1,
    "gate.bias_rate": 0.01,
    "gate.kind": "sigmoid",
    "data.seq_len": 16,
    "data.batch_size": 6,
    "data.documents": "packed",
    "optim.accumulate": 2,
    "optim.bucket_mb": 0.01,
    "run.steps": 4,
    "eval.every": 2,
}


def texts(folder: Path, name: str, count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    with (folder / name).open("w") as file:
        for _ in range(count):
            text = "".join(chr(c) for c in rng.integers(97, 123, rng.integers(1, 30)))
            file.write(json.dumps({"text": text}) + "\n")
    return str(folder / name)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Two sources, of which a share is held out."""
    parts = [texts(tmp_path, f"{name}.jsonl", 40, seed) for seed, name in enumerate("ab")]
    sources = tuple(SourceConfig(name=name, files=(part,)) for name, part in zip("ab", parts, strict=True))
    return with_values(TrainConfig(), {**SMALL, "data.source": sources, "eval.share": 0.3})


def evaluated(mesh: Mesh, config: TrainConfig) -> dict[str, Any]:
    """Twice, after a step."""
    learner = Learner(config, mesh)
    learner.step(0)
    loads = [layer.load_E.clone() for layer in learner.layers]
    first = learner.evaluate(2)
    same = [torch.equal(layer.load_E, load_E) for layer, load_E in zip(learner.layers, loads, strict=True)]
    assert all(same), "rows that were evaluated are no load of training"
    assert learner.evaluate(1) == {}
    assert learner.evaluate(2) == first, "a second time is the same"
    assert learner.model.training
    return first


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "more ranks than samples": (4, {"data.batch_size": 6, "optim.accumulate": 6, "parallel.ep": 2}),
    "tp": (2, {"parallel.tp": 2}),
    "pp": (2, {"parallel.pp": 2}),
    "stages that fold": (2, {"parallel.pp": 2, "pipeline.schedule": "dualpipev", "model.num_layers": 4}),
    "two directions": (2, {"parallel.pp": 2, "pipeline.schedule": "dualpipe"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_number_in_all_layouts(config: TrainConfig, layout: str) -> None:
    ranks, keys = LAYOUTS[layout]
    shape = {key: value for key, value in keys.items() if not key.startswith(("parallel", "pipeline"))}
    if "pipeline.schedule" in keys:
        shape |= {"optim.accumulate": 4, "data.batch_size": 8}
        keys = keys | shape
    expected = run_alone(evaluated, with_values(config, shape))
    axes = {"tp": keys.get("parallel.tp", 1), "pp": keys.get("parallel.pp", 1)}
    axes["mirrored"] = layout == "two directions"
    for found in run_ranks(ranks, evaluated, with_values(config, keys), **axes):
        assert found.keys() == expected.keys()
        assert found["eval_targets"] == expected["eval_targets"]
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=BOUND)
        for name, part in expected["eval_sources"].items():
            assert found["eval_sources"][name]["eval_loss"] == pytest.approx(part["eval_loss"], rel=BOUND)


def against_the_definition(mesh: Mesh, config: TrainConfig) -> tuple[float, float, int, int]:
    """(loss of the evaluation, mean of losses of windows one by one, targets of both)."""
    learner = Learner(config, mesh)
    assert learner.evaluation is not None
    found = learner.evaluation.run()
    samples, total, count = learner.evaluation.samples, 0.0, 0
    for window in learner.evaluation.windows:
        rows = samples.rows(np.array([window]))
        assert rows.documents is not None
        ids, targets, documents = (
            torch.from_numpy(one) for one in (rows.inputs, rows.targets, rows.documents)
        )
        where = Tokens(mesh=mesh, first=0, total=ids.numel())
        with torch.no_grad():
            total += float(learner.model(ids, targets, where, documents).loss_sum)
        count += int((targets >= 0).sum())
    return found["eval_loss"], total / count, found["eval_targets"], count


def test_it_is_the_mean_over_all_targets(config: TrainConfig) -> None:
    found, expected, targets, count = run_alone(against_the_definition, config)
    assert found == pytest.approx(expected, rel=BOUND)
    assert targets == count


def curve(mesh: Mesh, config: TrainConfig, evaluates: bool) -> list[Any]:
    learner = Learner(config, mesh)
    told = []
    for step in range(4):
        record = learner.step(step)
        if evaluates:
            assert learner.evaluation is not None
            learner.evaluation.run()
        told.append([record["loss"], record["grad_norm"], record["load"]])
    return told


def test_training_does_not_notice(config: TrainConfig) -> None:
    plain = run_ranks(2, curve, config, False)
    assert run_ranks(2, curve, config, True) == plain, "to the last bit"


def files_and_best(mesh: Mesh, config: TrainConfig, folder: str) -> dict[str, Any]:
    return train(with_values(config, {"run.dir": folder, "run.name": "r"}))


def test_a_run_with_files_tells_and_keeps_the_best(tmp_path: Path) -> None:
    train_file, eval_file = texts(tmp_path, "train.jsonl", 60), texts(tmp_path, "eval.jsonl", 9, 7)
    keys = {"data.files": (train_file,), "eval.files": (eval_file,), "run.steps": 6, "checkpoint.keep": 1}
    keys |= {"optim.lr": 1e-2, "checkpoint.every": 0, "parallel.deadline_s": 60.0}
    config = with_values(TrainConfig(), {**SMALL, **keys})
    summary = run_alone(files_and_best, config, str(tmp_path / "runs"))
    run = tmp_path / "runs" / "r"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"] + 1: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert sorted(losses) == [2, 4, 6]
    assert all(line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"])) for line in lines[1::2])
    best = min(losses, key=losses.__getitem__)
    assert (summary["best_step"], summary["best_eval_loss"]) == (best, losses[best])
    assert summary["eval_loss"] == losses[6]
    assert json.loads((run / "checkpoints" / "best.json").read_text())["step"] == best
    assert (run / "checkpoints" / f"step-{best:08d}").is_dir()


def test_some_windows_and_what_is_told() -> None:
    windows = np.arange(10, 20)
    assert some_of(windows, 0).tolist() == some_of(windows, 10).tolist() == windows.tolist()
    assert some_of(windows, 4).tolist() == [10, 12, 15, 17]
    assert told_of(math.log(4) * 3, 3)["eval_perplexity"] == pytest.approx(4)
    assert told_of(1e9, 1)["eval_perplexity"] < math.inf
    assert math.isnan(told_of(math.nan, 1)["eval_perplexity"])


def test_where_there_is_nothing_to_evaluate() -> None:
    learner: Any = None
    assert opened_for(TrainConfig(), learner, learner, learner, None) is None
    assert Evaluation is not None
    memory = with_values(TrainConfig(), {"data.order": "stream", "eval.share": 0.1})
    assert any("eval.files and eval.share cannot go with" in text for text in problems_of(memory))
    wrong = {"eval.share": 1.0, "eval.every": 0, "eval.samples": -1, "eval.files": ("",)}
    assert len(list(problems_of(with_values(TrainConfig(), wrong)))) == 4


def test_long_validation_is_announced(config: TrainConfig) -> None:
    """With a share of everything and no limit it may take longer than the steps between."""

    def notes(**changes: Any) -> list[str]:
        held = with_values(config, {"eval.share": 0.9, "data.batch_size": 2, **changes})
        evaluation = Learner(held, Mesh.single()).evaluation
        assert evaluation is not None
        return evaluation.notes

    (told,) = notes()
    assert told.startswith("validation reads ")
    assert told.endswith(" steps do; eval.samples limits them")
    assert notes(**{"eval.samples": 8}) == []
