"""Experts made of dense blocks: the first logits are those of the dense model, in any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import SMALL
from tiny_models import in_float64, load, write_tiny

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import Sourced, with_values
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import merge
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.run.before_ranks import weight_problems
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.init_from import load_weights_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
KINDS: dict[str, dict[str, Any]] = {
    "copy": {"init.upcycle": "copy", "moe.num_experts": 4, "moe.d_ff": 12, "gate.top_k": 2},
    "split": {"init.upcycle": "split", "moe.num_experts": 4, "moe.d_ff": 3, "gate.top_k": 4},
    "split and copied": {"init.upcycle": "split", "moe.num_experts": 4, "moe.d_ff": 6, "gate.top_k": 4},
    "scaled": {"init.upcycle": "copy", "moe.num_experts": 3, "moe.d_ff": 12, "gate.scale": 2.5},
}
LAYOUTS: dict[str, dict[str, int]] = {"ep": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "dp": {"dp": 2}}
TEXT = str(Path(__file__).parents[1] / "text.txt")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dense")

    def write(mesh: Mesh) -> None:
        for family in FAMILIES:
            write_tiny(family, root / family, intermediate_size=12, vocab_size=256)

    run_alone(write)
    return root


def configure(folder: Path, **changes: Any) -> TrainConfig:
    """As the command line makes it of a folder and flags."""
    values = {"data.files": (TEXT,), "data.seq_len": 8, "data.batch_size": 4, "model.dtype": "float64"}
    given = {"run.init_from": str(folder), "gate.balance_loss": 0.0, "model.num_dense_layers": 0, **changes}
    flags = {key: Sourced(value, "test") for key, value in given.items()}
    config = merge(flags=flags).built.checked()
    return with_values(config, {**values, "data.tokenizer": ""})


def begun(mesh: Mesh, config: TrainConfig) -> Learner:
    learner = Learner(config, mesh)
    load_weights_of(config.run.init_from, learner, PatientRanks(mesh, 60))
    return learner


def apart(mesh: Mesh, config: TrainConfig) -> float:
    """How far the first logits are from those of transformers' dense model."""
    learner = begun(mesh, config)
    ids = torch.randint(0, config.model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(3))
    with in_float64(), torch.no_grad():
        expected = load(Path(config.run.init_from)).double()(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        hidden, _ = learner.model.hidden(ids, Tokens(mesh=mesh, first=0, total=ids.numel()))
        found = learner.model.logits(hidden)
    return difference(found.view_as(expected), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_logits_are_those_of_the_dense_model(models: Path, family: str) -> None:
    kinds = KINDS if family == "llama" else {name: KINDS[name] for name in ("copy", "split")}
    for name, changes in kinds.items():
        assert run_alone(apart, configure(models / family, **changes)) <= 1e-12, name


def pieces(mesh: Mesh, config: TrainConfig) -> dict[tuple[str, int], torch.Tensor]:
    learner = begun(mesh, config)
    found = {(piece.name, piece.start): piece.data.clone() for piece in learner.optim.pieces()}
    return {where: data for where, data in found.items() if where[0].startswith("weight/")}


def test_every_layout_begins_with_the_same_weights(models: Path) -> None:
    changes = {"init.upcycle": "split", "moe.num_experts": 4, "moe.d_ff": 6, "init.noise": 0.5}
    config = configure(models / "qwen3", **changes)
    alone = run_alone(pieces, config)
    for name, axes in LAYOUTS.items():
        layout = {f"parallel.{axis}": size for axis, size in axes.items() if axis != "dp"}
        sharded = {"moe.expert_tp": "sharded"} if name == "tp" else {}
        both = run_ranks(2, pieces, with_values(config, {**layout, **sharded}), **axes)
        for (tensor, start), data in (item for rank in both for item in rank.items()):
            whole = alone.get((tensor.split("[")[0], 0))
            assert whole is not None
            if "[" in tensor:
                first, stop = map(int, tensor.split("[:, ")[1].rstrip("]").split(":"))
                width = {"down": 6}.get(tensor.split("[")[0].rpartition(".")[2])
                rows = whole.view(-1, width or whole.numel() // config.model.d_model)
                whole = rows[:, first:stop].flatten()
            assert torch.equal(data, whole[start : start + data.numel()]), (name, tensor)


def test_noise_tells_copies_apart(models: Path) -> None:
    changes = {"init.upcycle": "copy", "moe.num_experts": 2, "moe.d_ff": 12}
    plain = run_alone(pieces, configure(models / "llama", **changes))
    noisy = run_alone(pieces, configure(models / "llama", **changes, **{"init.noise": 2.0}))
    ups = [f"weight/layers.0.moe.experts.{expert}.up" for expert in (0, 1)]
    assert torch.equal(plain[ups[0], 0], plain[ups[1], 0])
    assert not torch.equal(noisy[ups[0], 0], noisy[ups[1], 0])
    std = float((noisy[ups[0], 0] - plain[ups[0], 0]).std())
    assert std == pytest.approx(2 * configure(models / "llama", **changes).model.init_std, rel=0.2)
    gates = "weight/layers.0.moe.gate.weight", 0
    assert torch.equal(plain[gates], noisy[gates])
    assert plain[gates].abs().sum() > 0


def saved_dense(mesh: Mesh, config: TrainConfig, folder: str) -> float:
    learner = Learner(config, mesh)
    learner.step(0)
    learner.save(Path(folder) / "checkpoints", 1)
    return float(learner.step(1)["loss"])


def first_loss(mesh: Mesh, config: TrainConfig) -> float:
    learner = begun(mesh, config)
    return float(learner.step(1)["loss"])


def own(folder: Path, **changes: Any) -> TrainConfig:
    plain = {**SMALL, "moe.num_shared_experts": 0, "moe.num_experts": 4, "data.files": (TEXT,)}
    return with_values(TrainConfig(), {**plain, "run.init_from": str(folder), **changes})


def test_a_dense_run_of_ours(tmp_path: Path) -> None:
    dense = with_values(own(tmp_path), {"model.num_dense_layers": 2, "model.d_ff": 12})
    expected = run_alone(saved_dense, dense, str(tmp_path))
    for changes in (KINDS["copy"], KINDS["split"], {**KINDS["copy"], "model.dense_layers": (1,)}):
        config = own(tmp_path, **{"model.d_ff": 12, **changes})
        assert run_alone(first_loss, config) == pytest.approx(expected, rel=1e-12)


def refused(mesh: Mesh, config: TrainConfig) -> str:
    try:
        begun(mesh, config)
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return ""


def test_what_does_not_fit_is_told_in_one_line(models: Path) -> None:
    wrong = {"init.upcycle": "copy", "moe.num_experts": 2, "moe.d_ff": 5}
    assert "moe.d_ff (5) must be 12" in run_alone(refused, configure(models / "llama", **wrong))
    odd = {"init.upcycle": "split", "moe.num_experts": 3, "moe.d_ff": 3}
    told = run_ranks(2, refused, configure(models / "llama", **odd))
    assert told[0] == told[1]
    assert "moe.num_experts (3) must be a multiple of 4" in told[0]


def test_a_dense_model_is_not_read_as_one_with_experts(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"no experts: --init-from with --init\.upcycle copy"):
        configure(models / "llama")
    other = {"init.upcycle": "copy", "moe.d_ff": 12, "model.d_model": 8}
    with pytest.raises(ConfigError, match=r"model\.d_model"):
        configure(models / "llama", **other)


def test_a_folder_of_another_shape_is_told_before_ranks_start(models: Path, tmp_path: Path) -> None:
    """Every number of its config.json counts, and so does every tensor's shape."""
    config = configure(models / "llama", **KINDS["copy"])
    assert not list(weight_problems(config))
    other = {"model.d_model": 64, "model.num_heads": 8, "model.num_layers": 1, "model.vocab_size": 128}
    for key, value in other.items():
        lines = list(weight_problems(with_values(config, {key: value})))
        assert any(key in line for line in lines), (key, lines)
        assert all(line.startswith(f"run.init_from ({models / 'llama'}): ") for line in lines)
    broken = tmp_path / "broken"
    shutil.copytree(models / "llama", broken)
    told = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**told, "intermediate_size": 24}))
    (line,) = weight_problems(with_values(config, {"run.init_from": str(broken)}))
    assert "has shape" in line
    assert "the configuration and the weights belong to different models" in line
