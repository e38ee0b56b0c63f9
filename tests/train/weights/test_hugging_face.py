"""A run from a Hugging Face model to one: trained on two ranks, exported, loaded and used by transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load, shrink_layers, write_tiny

from moeclipse.cli.main import main
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import ConfigError
from moeclipse.hf.folder import HfFolder
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.run import trainer
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.hugging_face import load_folder

STEPS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    run_alone(lambda _: write_tiny("qwen3_moe", path, vocab_size=256))
    return path


def command(folder: Path, runs: Path, *more: str) -> list[str]:
    words = f"train --model.from-hf {folder} --ranks 2 --run.device cpu --run.dir {runs} --run.name tuned"
    words += f" --run.steps {STEPS} --data.seq-len 16 --data.batch-size 4 --model.dtype float32"
    return [*words.split(), *more]


def use(_mesh: Mesh, path: Path) -> tuple[dict[str, torch.Tensor], list[int]]:
    model = load(path, torch.float32)
    ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    return {name: value.clone() for name, value in model.state_dict().items()}, ids[0].tolist()


def test_a_model_is_converted_trained_exported_and_used(folder: Path, tmp_path: Path) -> None:
    converted, plain = str(tmp_path / "converted"), tmp_path / "plain"
    assert main(["convert", str(folder), converted, "--no-tokenizer"]) == 0
    assert main(["convert", converted, str(plain)]) == 0
    assert main(command(plain, tmp_path, "--checkpoint.every", "40")) == 0
    run = tmp_path / "tuned"
    weights, ids = run_alone(use, run / "export")
    before, _ = run_alone(use, folder)
    assert len(ids) == 8
    assert weights.keys() == before.keys()
    changed = [name for name, value in weights.items() if not torch.equal(value, before[name])]
    assert len(changed) == len(weights), "all of it has learned"
    checkpoint = Checkpoint.open(run / "checkpoints" / f"step-{STEPS:08d}", OneRank())
    exported = HfFolder.open(run / "export")
    for name in exported.names:
        assert torch.equal(exported.read(name).double(), checkpoint.read(name).double()), name
    assert main(["convert", str(run), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        run / "export" / "model.safetensors"
    ).read_bytes()


def exports(_mesh: Mesh, words: list[str]) -> list[str]:
    """The checkpoints that a run of one rank exported, in order."""
    found: list[str] = []
    original = trainer.export

    def note(checkpoint: Path, *others: Any) -> None:
        found.append(checkpoint.name)
        original(checkpoint, *others)

    trainer.export = note  # type: ignore[assignment]
    assert main(words) == 0
    return found


@pytest.mark.parametrize(("when", "expected"), [("always", [2, 4, 5]), ("end", [5]), ("off", [])])
def test_when_a_run_exports(folder: Path, tmp_path: Path, when: str, expected: list[int]) -> None:
    words = command(folder, tmp_path, "--checkpoint.export", when, "--checkpoint.every", "2")
    text = tmp_path / "text.txt"
    text.write_text("a text of few words " * 100)
    words += [
        "--ranks",
        "1",
        "--run.steps",
        "5",
        "--checkpoint.asynchronous",
        "false",
        "--data.files",
        str(text),
    ]
    assert run_alone(exports, words) == [f"step-{step:08d}" for step in expected]
    assert (tmp_path / "tuned" / "export").exists() == (when != "off")


Break = Callable[[Path], None]


def truncate(path: Path) -> None:
    raw = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(raw[: len(raw) // 2])


def garble(path: Path) -> None:
    raw = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(b"\xff" * 16 + raw[16:])


def mix(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[1:]}, path / "a.safetensors")
    placed = dict.fromkeys(names, "a.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def contradict(path: Path) -> None:
    shrink_layers(path, moe_intermediate_size=5)


FAULTS: dict[str, tuple[Break, str]] = {
    "truncated": (truncate, "model.safetensors is truncated or damaged"),
    "corrupt": (garble, "model.safetensors is truncated or damaged"),
    "mixed": (mix, "files of different models are mixed"),
    "contradicted": (contradict, "belong to different models"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_one_line_and_nothing_is_written(
    folder: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, (change, text) = tmp_path / "model", FAULTS[fault]
    shutil.copytree(folder, broken)
    (broken / "tokenizer.json").unlink(missing_ok=True)
    change(broken)
    for words in (
        ["convert", str(broken), str(tmp_path / "out"), "--no-tokenizer"],
        command(broken, tmp_path / "runs"),
    ):
        assert main(words) != 0
        told = capsys.readouterr().err.strip()
        assert text in told
        assert "\n" not in told
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def slices(mesh: Mesh, config: TrainConfig) -> list[tuple[str, int, int]]:
    """What this rank read."""
    read: list[tuple[str, int, int]] = []
    original = HfFolder.read

    def note(self: HfFolder, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        result = original(self, name, start, stop)
        read.append((name, start, result.numel()))
        return result

    HfFolder.read = note  # type: ignore[method-assign]
    learner = Learner(config, mesh)
    load_folder(learner, PatientRanks(mesh, 60))
    return read


def config_for(folder: Path, **values: Any) -> TrainConfig:
    given = {"model.from_hf": str(folder), "data.seq_len": 16, "data.batch_size": 4, **values}
    return with_values(TrainConfig(), {**HfFolder.open(folder).values, **given})


def test_no_rank_reads_the_whole_model(folder: Path) -> None:
    """Each reads the shards that it owns; the others get them from there, as after every step."""
    table = HfFolder.open(folder).table
    total = sum(tensor.rows * tensor.width for tensor in table.values())
    for ranks in (
        run_ranks(4, slices, config_for(folder), dp=2),
        run_ranks(2, slices, config_for(folder, **{"parallel.tp": 2}), tp=2),
    ):
        counts = [sum(count for _, _, count in read) for read in ranks]
        assert sum(counts) == total
        assert max(counts) < 1.2 * total / len(ranks)


def contradicts(mesh: Mesh, config: TrainConfig) -> str:
    learner = Learner(config, mesh)
    with pytest.raises(ConfigError, match="contradicts") as error:
        load_folder(learner, PatientRanks(mesh, 60))
    return str(error.value)


def test_another_shape_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(folder)
    text = run_alone(contradicts, replace(config, model=replace(config.model, norm_eps=0.1)))
    assert "model.norm_eps (0.1) contradicts" in text
    assert main(command(folder, tmp_path, "--model.d-model", "32")) == 2
    assert "model.d_model (32) contradicts" in capsys.readouterr().err
    assert main(command(tmp_path / "nothing", tmp_path)) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()
