"""The folder of checkpoints: which are kept, which are set aside, and what never has half a name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from checkpoint_bed import CountingDisk, names_in, save_step, tensors_at, whole

from moeclipse.train.checkpoints import folder as layout
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, newest, save
from moeclipse.train.checkpoints.disk import DISK

ONE = OneRank()


def holds(checkpoint: Checkpoint | None, step: int) -> bool:
    assert checkpoint is not None
    return all(torch.equal(checkpoint.read(name), t.reshape(-1)) for name, t in tensors_at(step).items())


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)


def test_checkpoints_are_known_by_name_newest_first(tmp_path: Path) -> None:
    make(tmp_path, "step-00000010", "step-100000000", "step-00000010.replaced", "step-00000005")
    make(tmp_path, "step-10", "step-00000020.abandoned", ".tmp-step-00000030-1f", ".trash-step-00000001")
    (tmp_path / "step-00000040").write_text("a file, no folder")
    found = [(entry.step, entry.is_replaced) for entry in layout.checkpoints_in(tmp_path)]
    assert found == [(100_000_000, False), (10, False), (10, True), (5, False)]
    assert layout.checkpoints_in(tmp_path / "nowhere") == []
    assert layout.step_name(7) == "step-00000007"


def test_what_dead_saves_left_is_removed(tmp_path: Path) -> None:
    make(tmp_path, "step-00000010", ".tmp-step-00000020-dead", ".trash-step-00000001", ".mine")
    (tmp_path / ".tmp-note").write_text("a file of somebody")
    layout.remove_leftovers(DISK, tmp_path)
    assert names_in(tmp_path) == [".mine", ".tmp-note", "step-00000010"]


def test_a_commit_that_fails_gives_the_replaced_one_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, ".tmp-new", "step-00000010", "step-00000010.replaced")
    (tmp_path / "step-00000010" / "file").write_text("old")
    real = os.rename

    def fails(source: Path, target: Path) -> None:
        if source.name == ".tmp-new":
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output"):
        layout.commit(DISK, tmp_path / ".tmp-new", tmp_path / "step-00000010")
    assert (tmp_path / "step-00000010" / "file").read_text() == "old"
    monkeypatch.undo()
    layout.commit(DISK, tmp_path / ".tmp-new", tmp_path / "step-00000010")
    assert (tmp_path / "step-00000010" / "file").read_text() == ".tmp-new"
    assert (tmp_path / "step-00000010.replaced" / "file").read_text() == "old", "until it is pruned"


def test_a_commit_is_durable(tmp_path: Path) -> None:
    make(tmp_path, ".tmp-new")
    disk = CountingDisk()
    layout.commit(disk, tmp_path / ".tmp-new", tmp_path / "step-00000010")
    assert [kind for kind, _ in disk.log] == ["rename", "fsync_folder"]


def test_a_name_is_gone_for_good_before_its_files_are(tmp_path: Path) -> None:
    make(tmp_path, "step-00000010", ".trash-step-00000010")
    disk = CountingDisk()
    layout.discard(disk, tmp_path / "step-00000010")
    kinds = [kind for kind, _ in disk.log]
    assert kinds == ["unlink", "remove_folder", "rename", "fsync_folder", "unlink", "remove_folder"]
    assert names_in(tmp_path) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a" / "checkpoints"
    for step in (5, 10, 20, 100_000_000, 100_000_010):
        save_step(folder, step, ONE, keep=3)
    assert names_in(folder) == ["step-00000020", "step-100000000", "step-100000010"]
    found = newest(folder, ONE)
    assert found.passed_over == ()
    assert holds(found.checkpoint, 100_000_010)


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-final").mkdir()
    for step in (1, 2, 3):
        save_step(tmp_path, step, ONE, keep=1)
    assert names_in(tmp_path) == ["notes.txt", "step-00000003", "step-final"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, [whole("x", torch.zeros(3))], {}, ONE, keep=1)
    save(tmp_path, 10, [whole("x", torch.ones(3))], {}, ONE, keep=1)
    assert names_in(tmp_path) == ["step-00000010"]
    assert Checkpoint.open(tmp_path / "step-00000010", ONE).read("x").tolist() == [1, 1, 1]


def test_a_run_that_went_back_does_not_resume_the_way_it_left(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, ONE, keep=3)
    save_step(tmp_path, 15, ONE, keep=2)
    assert names_in(tmp_path) == [
        "step-00000010",
        "step-00000015",
        "step-00000020.abandoned",
        "step-00000030.abandoned",
    ]
    assert holds(newest(tmp_path, ONE).checkpoint, 15)
    assert holds(Checkpoint.open(tmp_path / "step-00000030.abandoned", ONE), 30)
