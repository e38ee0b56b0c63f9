"""A folder that is there whole or not at all, and goes on where it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.core.errors import CheckpointError
from moeclipse.train.weights.staging import JOURNAL, StagedFolder


def write(staged: StagedFolder, name: str, text: str, calls: list[str]) -> None:
    def chunks() -> list[memoryview]:
        calls.append(name)
        return [memoryview(text.encode())]

    staged.add(name, chunks)


def test_a_folder_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    out, calls = tmp_path / "deep" / "out", list[str]()
    staged = StagedFolder(out, "job")
    write(staged, "a", "one", calls)
    assert not out.exists()
    assert staged.commit() == out
    assert sorted(path.name for path in out.iterdir()) == ["a"], "no journal, nothing half"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(CheckpointError, match="out exists; choose another folder"):
        StagedFolder(out, "job")


def test_an_interrupted_job_goes_on(tmp_path: Path) -> None:
    out, calls = tmp_path / "out", list[str]()
    first = StagedFolder(out, "job")
    write(first, "a", "one", calls)
    write(first, "b", "two", calls)
    (first.path / "b").write_text("tw")  # the machine stopped while b was written
    (first.path / "c").write_text("left behind")
    second = StagedFolder(out, "job")
    write(second, "a", "one", calls)
    write(second, "b", "two", calls)
    assert calls == ["a", "b", "b"]
    assert second.kept == 1
    second.commit()
    assert {path.name: path.read_text() for path in out.iterdir()} == {"a": "one", "b": "two"}


def test_what_another_job_left_behind_is_removed(tmp_path: Path) -> None:
    out, calls = tmp_path / "out", list[str]()
    write(StagedFolder(out, "job"), "a", "one", calls)
    write(StagedFolder(out, "other"), "a", "two", calls)
    (out.with_name(".out.partial") / JOURNAL).write_text("{")
    staged = StagedFolder(out, "other")
    write(staged, "a", "three", calls)
    assert calls == ["a", "a", "a"]
    assert (staged.commit() / "a").read_text() == "three"
