"""Models that never were a Hugging Face folder leave as one, and transformers computes the same with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_compose import values_of
from tiny_models import TINY, in_float64, load, write_tiny

from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.hf.compose import named
from moeclipse.hf.folder import HfFolder
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load as load_preset
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.convert import to_hf
from moeclipse.train.weights.hugging_face import load_folder

SMALL = {
    "data.seq_len": 8,
    "data.batch_size": 2,
    "optim.lr": 0.1,
    "optim.warmup_steps": 0,
    "model.dtype": "float64",
    "model.init_std": 0.4,
    "gate.balance_loss": 0.0,
}
NARROW = {
    "model.vocab_size": 256,
    "model.d_model": 16,
    "model.num_heads": 4,
    "model.d_ff": 12,
    "moe.d_ff": 6,
    "model.num_kv_heads": 4,
    "model.head_dim": 4,
    "moe.num_experts": 16,
    "model.kv_lora_rank": 6,
    "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 4,
    "model.num_layers": 2,
}


def trained(mesh: Mesh, config: TrainConfig, root: Path) -> str:
    """A run of a few steps, with all that matters of one on disk; steps are large, so that norms move."""
    learner = Learner(config, mesh)
    for step in range(3):
        learner.step(step)
    (root / "config.toml").write_text(to_toml(config))
    return str(learner.save(root / "checkpoints", 3))


def compared(mesh: Mesh, config: TrainConfig, root: Path, family: str = "") -> tuple[float, str]:
    """(how far logits are apart, the family)."""
    path = trained(mesh, config, root)
    done = to_hf(Checkpoint.open(path, OneRank()), root / "out", family=family)
    learner = Learner(config, mesh)
    learner.load(Checkpoint.open(path, OneRank()))
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, config.model.vocab_size, (3, 8)))
    tokens = Tokens(mesh=mesh, first=0, total=ids.numel())
    with torch.no_grad():
        ours = learner.model.eval().logits(learner.model.hidden(ids, tokens)[0])
        with in_float64():
            theirs = load(root / "out").double()(input_ids=ids, use_cache=False).logits
    HfFolder.open(root / "out")
    return difference(ours, theirs.flatten(0, 1)), done.family


def scratch(root: Path, **values: Any) -> TrainConfig:
    np.save(root / "tokens.npy", np.random.default_rng(0).integers(0, 48, 200).astype(np.uint16))
    return with_values(TrainConfig(), {**SMALL, "data.files": (str(root / "tokens.npy"),), **values})


@pytest.mark.parametrize("model_type", TINY)
def test_a_model_of_each_family_leaves_with_its_logits(model_type: str, tmp_path: Path) -> None:
    """With no folder before it: weights, biases of the choice and configuration are all ours."""
    values = values_of(model_type) | SMALL
    if named(model_type).has_choice_bias(values):
        values["gate.bias_rate"] = 0.05
    config = scratch(tmp_path, **values)
    apart, _ = run_alone(compared, config, tmp_path, model_type)
    assert apart < 1e-12


def went_through(mesh: Mesh, model_type: str, root: Path) -> tuple[float, float]:
    """How far logits are apart behind a folder, a run and a folder; and from those of the first folder."""
    write_tiny(model_type, root / "model")
    steps = {key: value for key, value in SMALL.items() if key != "model.init_std"}
    np.save(root / "tokens.npy", np.random.default_rng(0).integers(0, 48, 200).astype(np.uint16))
    files = {"model.from_hf": str(root / "model"), "data.files": (str(root / "tokens.npy"),)}
    config = with_values(TrainConfig(), steps | files)
    learner = Learner(config, mesh)
    load_folder(learner, OneRank())
    for step in range(3):
        learner.step(step)
    (root / "config.toml").write_text(to_toml(config))
    learner.save(root / "checkpoints", 3)
    assert main(["convert", str(root), str(root / "out")]) == 0
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, config.model.vocab_size, (3, 8)))
    tokens = Tokens(mesh=mesh, first=0, total=ids.numel())
    with torch.no_grad():
        ours = learner.model.eval().logits(learner.model.hidden(ids, tokens)[0])
        with in_float64():
            before, behind = (
                load(root / name).double()(input_ids=ids, use_cache=False).logits.flatten(0, 1)
                for name in ("model", "out")
            )
    return difference(ours, behind), difference(before, behind)


@pytest.mark.parametrize("model_type", TINY)
def test_a_folder_of_each_family_goes_in_trains_and_leaves(model_type: str, tmp_path: Path) -> None:
    apart, moved = run_alone(went_through, model_type, tmp_path)
    assert apart < 1e-12
    assert moved > 1e-3, "three steps have changed it"


@pytest.mark.parametrize(
    "name", ["tiny", "deepseek-v2-lite-9l", "deepseek-v3-tiny", "olmoe-12l", "qwen3-moe-8l"]
)
def test_presets_leave_without_being_told_a_family(name: str, tmp_path: Path) -> None:
    values = NARROW | SMALL | {"data.files": (str(tmp_path / "tokens.npy"),)}
    scratch(tmp_path)
    config = with_values(load_preset(preset=name), values)
    apart, family = run_alone(compared, config, tmp_path)
    assert apart < 1e-12
    assert family.lower().split("-")[0] in (name.split("-")[0], "mixtral")


def test_a_run_of_bytes_leaves_with_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Grüße, 世界: was the first line.\n" * 40)
    config = with_values(TrainConfig(), NARROW | SMALL | {"data.files": (str(text),)})
    run_alone(trained, config, tmp_path)
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "Mixtral: " in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("Grüße, 世界 \x00\x7f")["input_ids"]
    assert ids == list("Grüße, 世界 \x00\x7f".encode())
    assert tokenizer.decode(ids) == "Grüße, 世界 \x00\x7f"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["max_position_embeddings"] == 8
    assert main(["generate", str(tmp_path / "out"), "--prompt", "was", "--max-tokens", "3"]) == 0


def test_what_stands_in_the_way_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = scratch(tmp_path, **NARROW, **{"moe.activation": "relu2"})
    path = run_alone(trained, config, tmp_path)
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "no family holds" in error
    assert "the nearest is Mixtral (mixtral), but not moe.activation = 'relu2'" in error
    assert error.count("\n") == 1
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--family", "mixtrall"]) == 2
    assert "did you mean mixtral?" in capsys.readouterr().err
    (tmp_path / "config.toml").rename(tmp_path / "gone.toml")
    with pytest.raises(CheckpointError, match=r"stands in the config.toml of its run"):
        to_hf(Checkpoint.open(path, OneRank()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bias_of_the_choice_is_not_lost(tmp_path: Path) -> None:
    """A configuration may have been changed after the weights were made: weights have the last word."""
    config = scratch(tmp_path, **NARROW, **{"gate.bias_rate": 0.05})
    path = run_alone(trained, config, tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(with_values(config, {"gate.bias_rate": 0.0})))
    with pytest.raises(CheckpointError, match=r"gate.bias_E is not zero in a model of this family"):
        to_hf(Checkpoint.open(path, OneRank()), tmp_path / "out")
