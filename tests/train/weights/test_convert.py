"""Folders to checkpoints and back, bit by bit; whatever is wrong leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import load, shrink_layers, write_tiny

from moeclipse.core.errors import CheckpointError
from moeclipse.hf.folder import HfFolder
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.checkpoints.disk import Disk
from moeclipse.train.checkpoints.manifest import INDEX
from moeclipse.train.weights.convert import from_hf, to_hf
from moeclipse.train.weights.open_model import of_checkpoint

FAMILIES = ("qwen3_moe", "gpt_oss", "granitemoe", "ernie4_5_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")

    def write(_mesh: Any) -> None:
        for name in FAMILIES:
            write_tiny(name, root / name)
            narrow = {}
            for key, value in load_file(root / name / "model.safetensors").items():
                narrow[key] = value.float() if "gate.weight" in key else value.bfloat16()
            save_file(narrow, root / name / "model.safetensors", {"format": "pt"})

    run_alone(write)
    for name in FAMILIES:
        (root / name / "tokenizer.json").write_text("{}")
    return {name: root / name for name in FAMILIES}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def opened(path: Path) -> Checkpoint:
    return Checkpoint.open(path, OneRank())


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_is_the_same_bit_by_bit(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    there = from_hf(folders[name], tmp_path / "ours")
    back = to_hf(opened(there.path), tmp_path / "theirs", most=4000)
    before, after = tensors(folders[name]), tensors(back.path)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert after[key].dtype == value.dtype
        assert torch.equal(after[key].view(torch.uint8), value.view(torch.uint8)), key
    config = json.loads((folders[name] / "config.json").read_text())
    assert json.loads((tmp_path / "theirs" / "config.json").read_text()) == config
    assert (tmp_path / "theirs" / "tokenizer.json").read_text() == "{}"
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1, "several shards"
    run_alone(lambda _: load(tmp_path / "theirs", torch.bfloat16) and None)


def test_another_type_may_be_chosen(folders: dict[str, Path], tmp_path: Path) -> None:
    from_hf(folders["ernie4_5_moe"], tmp_path / "ours", dtype="float32")
    assert opened(tmp_path / "ours").dtype("weight/embedding") == torch.float32
    to_hf(opened(tmp_path / "ours"), tmp_path / "theirs", dtype="float16")
    kinds = {key: value.dtype for key, value in tensors(tmp_path / "theirs").items()}
    assert kinds["model.norm.weight"] == torch.float16
    biases = [kind for key, kind in kinds.items() if "e_score_correction" in key]
    assert biases == [torch.bfloat16], "what is no weight keeps its type"
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["dtype"] == "float16"


def test_tensors_that_take_no_part_travel_along(folders: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(folders["qwen3_moe"], tmp_path / "source"))
    shrink_layers(source, num_hidden_layers=1, num_nextn_predict_layers=1)
    from_hf(source, tmp_path / "ours")
    to_hf(opened(tmp_path / "ours"), tmp_path / "theirs")
    before, after = tensors(source), tensors(tmp_path / "theirs")
    assert all(torch.equal(after[key], value) for key, value in before.items())


class Interrupted(Disk):
    """Stops at the n-th file."""

    def __init__(self, files: int) -> None:
        self.left = files

    def create(self, path: Path) -> Any:
        if not path.name.startswith("journal"):
            self.left -= 1
            if self.left < 0:
                raise OSError(28, os.strerror(28), str(path))
        return super().create(path)


def test_an_interrupted_conversion_goes_on(folders: dict[str, Path], tmp_path: Path) -> None:
    for files in (1, 1, 2):
        with pytest.raises(OSError, match="No space left"):
            from_hf(folders["qwen3_moe"], tmp_path / "ours", disk=Interrupted(files))
        assert not (tmp_path / "ours").exists()
    done = from_hf(folders["qwen3_moe"], tmp_path / "ours")
    assert done.kept == 4
    for files in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            to_hf(opened(done.path), tmp_path / "theirs", most=4000, disk=Interrupted(files))
    back = to_hf(opened(done.path), tmp_path / "theirs", most=4000)
    assert back.kept == 3
    assert tensors(back.path).keys() == tensors(folders["qwen3_moe"]).keys()


def test_a_converted_folder_is_verified(folders: dict[str, Path], tmp_path: Path) -> None:
    from_hf(folders["qwen3_moe"], tmp_path / "ours")
    to_hf(opened(tmp_path / "ours"), tmp_path / "theirs")
    HfFolder.open(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model.safetensors has changed .its SHA-256"):
        HfFolder.open(tmp_path / "theirs")


def test_what_is_wrong_leaves_nothing_behind(folders: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(folders["qwen3_moe"], tmp_path / "source"))
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        from_hf(source, tmp_path / "out" / "ours")
    shrink_layers(source, hidden_act="gelu")
    with pytest.raises(CheckpointError, match="another activation"):
        from_hf(source, tmp_path / "out" / "ours", tokenizer=False)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_no_family_is_refused(tmp_path: Path) -> None:
    class Own:
        path, state = tmp_path, {"step": 3}

    (tmp_path / INDEX).write_text('{"state": {"step": 3}}')
    with pytest.raises(CheckpointError, match=r"stands alone, and what model it is stands in"):
        to_hf(Own(), tmp_path / "out")
    for model in ("5", '{"dtype": "F32"}', '{"config": 5}'):
        (tmp_path / INDEX).write_text(f'{{"state": {{"hf": {model}}}}}')
        with pytest.raises(CheckpointError, match=r"cannot be read: state\.hf\.config is no table"):
            of_checkpoint(tmp_path)
