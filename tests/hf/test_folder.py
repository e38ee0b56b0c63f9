"""Folders: slices of every kind, and what is wrong with a folder in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import shrink_layers, write_tiny

from moeclipse.core.errors import CheckpointError
from moeclipse.hf.folder import HfFolder
from moeclipse.testing.run_ranks import run_alone

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")

    def write(_mesh: Any) -> None:
        for name in ("qwen3_moe", "gpt_oss", "granitemoe"):
            write_tiny(name, root / name)

    run_alone(write)
    return {name: root / name for name in ("qwen3_moe", "gpt_oss", "granitemoe")}


def in_halves(path: Path) -> Path:
    """The same folder with its tensors in two files and an index."""
    tensors = load_file(path / FILE)
    keys = sorted(tensors)
    halves = {"model-1.safetensors": keys[::2], "model-2.safetensors": keys[1::2]}
    for file, part in halves.items():
        save_file({key: tensors[key] for key in part}, path / file)
    placed = {key: file for file, part in halves.items() for key in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (path / FILE).unlink()
    return path


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["qwen3_moe"], tmp_path / "copy"))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_any_range_of_any_tensor(folders: dict[str, Path], name: str) -> None:
    folder = HfFolder.open(folders[name])
    for key, tensor in folder.table.items():
        whole = folder.read(key)
        assert whole.numel() == tensor.rows * tensor.width
        for start, stop in ((0, 1), (3, 11), (whole.numel() - 2, whole.numel()), (2, 2)):
            assert torch.equal(folder.read(key, start, stop), whole[start:stop])
        if tensor.width > 3:
            columns = whole.view(tensor.rows, tensor.width)[:, 1:4]
            assert torch.equal(folder.read(f"{key}[:, 1:4]"), columns.reshape(-1))
            assert torch.equal(folder.read(f"{key}[:, 1:4]", 2, 5), columns.reshape(-1)[2:5])


def test_values_are_those_of_the_file(folders: dict[str, Path]) -> None:
    tensors = load_file(folders["gpt_oss"] / FILE)
    folder = HfFolder.open(folders["gpt_oss"])
    fused = tensors["model.layers.1.mlp.experts.gate_up_proj"][2]
    up = folder.read("weight/layers.1.moe.experts.2.up").view(12, 16)
    assert torch.equal(up, torch.cat([fused[:, ::2].t(), fused[:, 1::2].t()]))
    bias = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][2]
    assert torch.equal(
        folder.read("weight/layers.1.moe.experts.2.up_bias"), torch.cat([bias[::2], bias[1::2]])
    )
    down = folder.read("weight/layers.1.moe.experts.2.down").view(16, 6)
    assert torch.equal(down, tensors["model.layers.1.mlp.experts.down_proj"][2].t())


def test_files_with_an_index_are_one_folder(copy: Path, folders: dict[str, Path]) -> None:
    whole, halves = HfFolder.open(folders["qwen3_moe"]), HfFolder.open(in_halves(copy))
    assert halves.names == whole.names
    assert all(torch.equal(halves.read(name), whole.read(name)) for name in whole.names)
    assert "weight/embedding" in halves
    with pytest.raises(CheckpointError, match="no tensor for 'weight/nothing'"):
        halves.read("weight/nothing")


def refused(path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        HfFolder.open(path)
    assert "\n" not in str(error.value)


def test_truncated_and_missing_files(copy: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no such folder")
    halves = in_halves(copy)
    raw = (halves / "model-2.safetensors").read_bytes()
    for size in (0, 5, 100, len(raw) - 1):
        (halves / "model-2.safetensors").write_bytes(raw[:size])
        refused(halves, "model-2.safetensors is truncated or damaged")
    (halves / "model-2.safetensors").unlink()
    refused(halves, "model-2.safetensors is missing")
    (halves / "model.safetensors.index.json").write_text("{")
    refused(halves, "index.json is not JSON")
    (halves / "model.safetensors.index.json").unlink()
    refused(halves, "has neither model.safetensors.index.json nor model.safetensors")
    (halves / "config.json").write_text("[]")
    refused(halves, "holds no table")
    (halves / "config.json").unlink()
    refused(halves, "has no config.json")


def test_mixed_files(copy: Path) -> None:
    halves = in_halves(copy)
    first = load_file(halves / "model-1.safetensors")
    name = sorted(first)[0]
    save_file({key: value for key, value in first.items() if key != name}, halves / "model-1.safetensors")
    refused(halves, f"puts {name} in model-1.safetensors, which does not hold it; files of different models")
    save_file({**first, "something.else": first[name].clone()}, halves / "model-1.safetensors")
    refused(halves, "holds something.else, but model.safetensors.index.json does not know it")
    (halves / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b"}}))
    refused(halves, "not a plain name inside the folder")


def test_a_configuration_of_another_model(copy: Path) -> None:
    shrink_layers(copy, num_hidden_layers=3)
    refused(copy, "lacks .* tensors that its config.json asks for, such as model.layers.2.")
    shrink_layers(copy, num_hidden_layers=1)
    refused(copy, "holds .* tensors that a Qwen3-MoE of this config.json has not, such as model.layers.1.")
    shrink_layers(copy, num_hidden_layers=2, moe_intermediate_size=5)
    refused(copy, r"has shape \[6, 16\], but config.json asks for \[5, 16\]")
    shrink_layers(copy, model_type="llama")
    refused(copy, "is no family that we read")


def test_layers_behind_the_last_are_extra_where_they_are_announced(copy: Path) -> None:
    shrink_layers(copy, num_hidden_layers=1, num_nextn_predict_layers=1)
    folder = HfFolder.open(copy)
    assert folder.extra
    assert all(key.startswith("model.layers.1.") for key in folder.extra)
    assert torch.equal(folder.whole(folder.extra[0]), load_file(copy / FILE)[folder.extra[0]])


def test_nothing_of_a_folder_leads_out_of_it_or_makes_us_wait(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((copy / "config.json").read_bytes())
    for name in ("config.json", "model.safetensors"):
        (copy / name).rename(tmp_path / "kept")
        (copy / name).symlink_to(outside)
        refused(copy, "outside of")
        (copy / name).unlink()
        os.mkfifo(copy / name)
        refused(copy, "a pipe, not a regular file")
        (copy / name).unlink()
        (tmp_path / "kept").rename(copy / name)
    sound = (copy / "config.json").read_bytes()
    (copy / "config.json").write_bytes(b"[" * 100_000)
    refused(copy, "nested deeper than")
    (copy / "config.json").write_bytes(b"\xff\xfe")
    refused(copy, "config.json")
    (copy / "config.json").write_bytes(sound)
    for name in ("../x", "/etc/passwd", "..", "a\0b"):
        (copy / "moeclipse.json").write_text(json.dumps({"sha256": {name: "0"}}))
        refused(copy, "moeclipse.json names .*, which is no file of the folder")
    for text in ("[]", "7", '{"sha256": []}', "{}"):
        (copy / "moeclipse.json").write_text(text)
        refused(copy, "moeclipse.json holds no table")
