"""Damage: any changed byte, a short, long or missing file is found and named before a tensor is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_bed import fork_ranks, save_step

from moeclipse.core.errors import CheckpointError
from moeclipse.train.checkpoints import checkpoint as checkpoint_module
from moeclipse.train.checkpoints import disk as disk_module
from moeclipse.train.checkpoints import manifest as manifest_module
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, Piece, Ranks, newest, save
from moeclipse.train.checkpoints.disk import Written
from moeclipse.train.checkpoints.manifest import encode_manifest

ONE = OneRank()
OLD, NEW = "step-00000010", "step-00000020"
MANIFEST = "manifest.json"
FILES = ["index.json", MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.fixture(autouse=True)
def no_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may touch a weight: damage must be known before."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a tensor was read from a damaged checkpoint")

    monkeypatch.setattr(checkpoint_module, "safe_open", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20, saved by two ranks."""

    def work(ranks: Ranks) -> None:
        save_step(tmp_path, 10, ranks)
        save_step(tmp_path, 20, ranks)

    fork_ranks(2, work)
    assert sorted(path.name for path in (tmp_path / NEW).iterdir()) == FILES
    return tmp_path


def falls_back(folder: Path) -> str:
    """What is said about step 20 when step 10 is taken instead."""
    found = newest(folder, ONE)
    assert found.checkpoint is not None
    assert found.checkpoint.path.name == OLD
    (text,) = found.passed_over
    return text


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_every_byte(folder: Path, name: str) -> None:
    size = (folder / NEW / name).stat().st_size
    assert_flips_are_found(folder, name, ((place, 1 << (place * 5 % 8)) for place in range(size)))


@pytest.mark.full
def test_every_flipped_bit_of_the_manifest(folder: Path) -> None:
    """It is read as it stands; of the others hashes are compared first, to which any bit of a byte is one."""
    size = (folder / NEW / MANIFEST).stat().st_size
    assert_flips_are_found(folder, MANIFEST, ((place, 1 << bit) for place in range(size) for bit in range(8)))


def assert_flips_are_found(folder: Path, name: str, flips: Iterable[tuple[int, int]]) -> None:
    path = folder / NEW / name
    whole = path.read_bytes()
    for position, bit in flips:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
        text = falls_back(folder)
        assert text.startswith(f"{NEW}: {name} "), (position, bit, text)
    path.write_bytes(whole)
    found = newest(folder, ONE)
    assert found.checkpoint is not None
    assert found.checkpoint.path.name == NEW
    assert found.passed_over == ()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_file(folder: Path, name: str, keep: int) -> None:
    path = folder / NEW / name
    size = path.stat().st_size
    os.truncate(path, keep if keep >= 0 else size - 1)
    text = falls_back(folder)
    assert text.startswith(f"{NEW}: {name} ")
    assert "truncated" in text or (name == MANIFEST and "changed" in text)
    with pytest.raises(
        CheckpointError, match=rf"checkpoint .*{NEW} cannot be loaded: {name} .*newest whole one"
    ):
        Checkpoint.open(folder / NEW, ONE)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / NEW / name).unlink()
    assert falls_back(folder) == f"{NEW}: {name} is missing"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_grown(folder: Path, name: str) -> None:
    with (folder / NEW / name).open("ab") as file:
        file.write(b" ")
    assert falls_back(folder).startswith(f"{NEW}: {name} has ")


def test_every_damage_is_listed(folder: Path) -> None:
    (folder / NEW / FILES[2]).unlink()
    os.truncate(folder / NEW / FILES[3], 5)
    assert falls_back(folder).startswith(f"{NEW}: {FILES[2]} is missing; {FILES[3]} is truncated (5 of ")


def test_all_damaged(folder: Path) -> None:
    for name in (OLD, NEW):
        (folder / name / FILES[0]).unlink()
    found = newest(folder, ONE)
    assert found.checkpoint is None
    assert found.passed_over == (f"{NEW}: index.json is missing", f"{OLD}: index.json is missing")


def test_a_path_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere cannot be loaded: there is no such folder"):
        Checkpoint.open(tmp_path / "nowhere", ONE)


def test_the_folder_above(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"holds checkpoints but is none itself; give .*{NEW}"):
        Checkpoint.open(folder, ONE)


# ---- several ranks


@pytest.mark.parametrize("name", FILES)
def test_all_ranks_agree(folder: Path, name: str) -> None:
    os.truncate(folder / NEW / name, 3)

    def work(ranks: Ranks) -> Any:
        found = newest(folder, ranks)
        assert found.checkpoint is not None
        return [found.checkpoint.path.name, *found.passed_over]

    reports = fork_ranks(3, work)
    assert reports[0]["result"][0] == OLD
    assert reports == [reports[0]] * 3
    errors = fork_ranks(3, lambda ranks: str(Checkpoint.open(folder / NEW, ranks)))
    assert name in errors[0]["error"]
    assert errors == [errors[0]] * 3


def test_hashing_is_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = disk_module.sha256_of

    def record(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(disk_module, "sha256_of", record)

    def work(ranks: Ranks) -> list[str]:
        Checkpoint.open(folder / NEW, ranks)
        return [name for name in hashed if name != "index.json"]

    reports = fork_ranks(3, work)
    assert [report["result"] for report in reports] == [[FILES[2]], [FILES[3]], []]


def test_ranks_that_see_different_folders(folder: Path, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        return str(Checkpoint.open(folder / (OLD if ranks.rank else NEW), ranks))

    reports = fork_ranks(2, work)
    assert all("ranks see different files" in report["error"] for report in reports)


# ---- made to harm


def forge(path: Path, change: Any) -> None:
    """Changes the index, and makes the manifest agree with it."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    raw = json.dumps(index).encode()
    (path / "index.json").write_bytes(raw)
    files = json.loads((path / "manifest.json").read_text())["files"]
    files["index.json"] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (path / "manifest.json").write_bytes(
        encode_manifest({name: Written(**entry) for name, entry in files.items()})
    )


@pytest.mark.parametrize(
    "name", ["../step-00000010/rank-00000.safetensors", "/etc/passwd", "index.json", "x"]
)
def test_an_index_that_leads_out_of_the_folder(folder: Path, name: str) -> None:
    def change(index: Any) -> None:
        index["tensors"]["mask"]["pieces"][0]["file"] = name

    forge(folder / NEW, change)
    assert falls_back(folder) == (
        f"{NEW}: index.json places tensor 'mask' in {name!r}, which is no file of this checkpoint"
    )


@pytest.mark.parametrize("name", ["../out", "/abs", "..", "a/b", "a\\b", ""])
def test_a_manifest_that_leads_out_of_the_folder(folder: Path, name: str) -> None:
    files = json.loads((folder / NEW / "manifest.json").read_text())["files"]
    files[name] = files[FILES[2]]
    raw = encode_manifest({key: Written(**entry) for key, entry in files.items()})
    (folder / NEW / "manifest.json").write_bytes(raw)
    assert f"names the file {name!r}, which is not a plain name" in falls_back(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [7, 7]),
        ("shape", [-7]),
        ("shape", "7"),
        ("dtype", "OBJECT"),
        ("pieces", []),
        ("pieces", [{"file": "rank-00000.safetensors", "key": "mask", "start": 0.0, "stop": 7}]),
        ("pieces", [{"file": "rank-00000.safetensors", "key": "mask", "stop": 7}]),
        ("pieces", 3),
    ],
)
def test_an_index_that_makes_no_sense(folder: Path, key: str, value: Any) -> None:
    def change(index: Any) -> None:
        index["tensors"]["mask"][key] = value

    forge(folder / NEW, change)
    assert falls_back(folder).startswith(f"{NEW}: ")


def test_an_index_that_differs_from_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(index: Any) -> None:
        index["tensors"]["mask"]["dtype"] = "U8"
        index["tensors"]["counts"]["pieces"][0]["key"] = "gone"

    forge(folder / NEW, change)
    monkeypatch.undo()
    checkpoint = Checkpoint.open(folder / NEW, ONE)
    with pytest.raises(
        CheckpointError, match=r"rank-00000.safetensors does not hold 'mask.*' as the index says"
    ):
        checkpoint.read("mask")
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors cannot be read: .*gone"):
        checkpoint.read("counts")


def test_a_later_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "VERSION", 2)
    path = save(tmp_path, 1, [Piece(name="x", shape=(1,), start=0, data=torch.ones(1))], {}, ONE, keep=1)
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match=r"manifest.json has format version 2; this MoEclipse reads version 1"
    ):
        Checkpoint.open(path, ONE)
    shutil.rmtree(path)


# ---- no reader stands still, follows a link or ends in a traceback


def rewrite(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"files": ' * 50_000, "null", "[]", "9" * 5000, '"x"'])
def test_a_manifest_that_is_none(folder: Path, text: str) -> None:
    rewrite(folder / NEW / "manifest.json", text)
    assert falls_back(folder).startswith(f"{NEW}: manifest.json is truncated or has changed")


@pytest.mark.parametrize(
    ("size", "digest"), [("12", "ab"), (-1, "ab"), (True, "ab"), (1.0, "ab"), (None, "ab"), (3, 7), ([], {})]
)
def test_a_manifest_with_sizes_that_are_none(folder: Path, size: Any, digest: Any) -> None:
    files = json.loads((folder / NEW / "manifest.json").read_text())["files"]
    files[FILES[2]] = {"size": size, "sha256": digest}
    raw = encode_manifest({key: Written(**entry) for key, entry in files.items()})
    (folder / NEW / "manifest.json").write_bytes(raw)
    text = falls_back(folder)
    assert text.startswith(f"{NEW}: manifest.json gives 'rank-00000.safetensors' the size {size!r}")


def test_a_manifest_without_end(folder: Path) -> None:
    os.truncate(folder / NEW / "manifest.json", manifest_module.MAX_MANIFEST + 1)
    assert falls_back(folder).startswith(f"{NEW}: manifest.json has grown beyond")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "socket"])
def test_only_regular_files_are_read(folder: Path, name: str, kind: str) -> None:
    """A link to the same bytes loads nowhere else: once the folder is copied, it leads to another file."""
    path = folder / NEW / name
    path.rename(folder / name)
    if kind == "link":
        path.symlink_to(folder / name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        import socket

        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path has room for a hundred characters
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(before)
    assert falls_back(folder) == f"{NEW}: {name} cannot be read: it is a {kind}, not a regular file"


def test_the_folder_itself_may_be_reached_by_a_link(folder: Path) -> None:
    (folder / "best").symlink_to(NEW)
    assert Checkpoint.open(folder / "best", ONE).state["step"] == 20


def test_an_index_of_great_depth(folder: Path) -> None:
    def change(index: Any) -> None:
        index["tensors"]["mask"] = [1]

    forge(folder / NEW, change)
    assert falls_back(folder).startswith(f"{NEW}: index.json is not a checkpoint's index")
