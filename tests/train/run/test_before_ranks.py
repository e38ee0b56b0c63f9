"""Names and shapes that do not fit are told before a rank starts, and no folder is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_learner import configure

from moeclipse.cli.train import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import OneRank
from moeclipse.train.run.before_ranks import weight_problems
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.init_from import load_weights_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:3000])
    return str(path)


def save(mesh: Mesh, config: TrainConfig, run: str) -> None:
    Learner(config, mesh).save(Path(run) / "checkpoints", 0)


@pytest.fixture(scope="module")
def runs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run with experts, and a dense one."""
    folders = {}
    dense = {"model.dense_layers": (0, 1), "model.d_ff": 16}
    for name, changes in {"experts": {}, "dense": dense}.items():
        folders[name] = str(tmp_path_factory.mktemp(name))
        run_alone(save, configure(corpus, **changes), folders[name])
    return folders


def told(corpus: str, changes: dict[str, Any]) -> list[str]:
    return list(weight_problems(with_values(configure(corpus), changes)))


def test_patterns_that_pick_nothing(corpus: str) -> None:
    lines = told(corpus, {"optim.frozen": ("embedings", "gate"), "optim.lr_factors": ("atention=2",)})
    assert [line.partition(";")[0] for line in lines] == [
        "optim.frozen: 'embedings' picks no parameter",
        "optim.lr_factors: 'atention' picks no parameter",
    ]
    assert not told(corpus, {"optim.frozen": ("embed", "layers.1.moe.gate"), "optim.lr_factors": ("norm=2",)})
    large = with_values(configure(corpus), {"moe.d_ff": 2**20, "optim.frozen": ("nothing",)})
    assert len(list(weight_problems(large))) == 1  # no weight is made


def test_weights_of_another_shape(runs: dict[str, str], corpus: str) -> None:
    path = runs["experts"]
    (line,) = told(corpus, {"run.init_from": path, "moe.d_ff": 24})
    assert line.startswith(f"run.init_from ({path}): moe.d_ff is ")
    assert not told(corpus, {"run.init_from": path})
    assert not told(corpus, {"run.init_from": path, "model.dtype": "float32"})


def test_a_start_that_holds_no_checkpoint(runs: dict[str, str], corpus: str, tmp_path: Path) -> None:
    """Ranks would have found it, after the run had got a folder that stood in its own way."""
    (line,) = told(corpus, {"run.init_from": str(tmp_path)})
    assert line.startswith(f"run.init_from ({tmp_path}): there is no checkpoint in it; give the folder of")
    shutil.copytree(runs["experts"], tmp_path, dirs_exist_ok=True)
    assert not told(corpus, {"run.init_from": str(tmp_path)})
    (index,) = tmp_path.rglob("index.json")
    index.write_bytes(index.read_bytes()[:100])
    (line,) = told(corpus, {"run.init_from": str(tmp_path)})
    assert line.endswith(f"no checkpoint in it can be read, such as {index.parent}")


def begun(mesh: Mesh, config: TrainConfig, path: str) -> list[float]:
    learner = Learner(config, mesh)
    load_weights_of(path, learner, OneRank())
    return [float(weight.double().sum()) for weight in learner.model.parameters()]


def test_what_weights_began_from_is_no_other_model(runs: dict[str, str], corpus: str) -> None:
    other = with_values(configure(corpus), {"model.init_std": 0.5, "run.init_from": runs["experts"]})
    assert not list(weight_problems(other))
    plain = run_alone(begun, configure(corpus), runs["experts"])
    assert run_alone(begun, other, runs["experts"]) == plain


def test_widths_of_upcycling(runs: dict[str, str], corpus: str) -> None:
    given = {"run.init_from": runs["dense"], "init.upcycle": "copy"}
    (line,) = told(corpus, {**given, "moe.d_ff": 24})
    assert "moe.d_ff (24) must be 16, the width of the dense blocks that are copied" in line
    assert not told(corpus, {**given, "moe.d_ff": 16, "model.init_std": 0.3})
    lines = told(corpus, {**given, "run.init_from": runs["experts"], "moe.d_ff": 16})
    assert any("has experts already" in line for line in lines)


def test_the_command_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    words = [
        "--preset",
        "tiny",
        "--run.device",
        "cpu",
        "--run.dir",
        str(tmp_path),
        "--optim.frozen",
        "embedings",
    ]
    with pytest.raises(ConfigError, match="'embedings' picks no parameter"):
        main(words)
    assert not list(tmp_path.iterdir())
