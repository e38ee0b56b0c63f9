"""The launcher's folder: its own, gone with it, and no trap for the next."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeclipse.cli.launcher_folder import LOCK, launcher_folder
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_ranks


@pytest.fixture(autouse=True)
def _below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def hold(told: multiprocessing.Queue[str]) -> None:
    with launcher_folder() as folder:
        told.put(str(folder))
        time.sleep(100)


def come_and_go(_: Mesh) -> None:
    with launcher_folder():
        pass


@contextlib.contextmanager
def another_launcher() -> Iterator[Path]:
    """Its folder while it lives; then it is killed."""
    context = multiprocessing.get_context("fork")
    told: multiprocessing.Queue[str] = context.Queue()
    process = context.Process(target=hold, args=(told,))
    process.start()
    try:
        yield Path(told.get(timeout=900))
    finally:
        process.kill()
        process.join()


def test_what_a_killed_launcher_left_is_removed(tmp_path: Path) -> None:
    with another_launcher() as left, launcher_folder():
        assert left.exists()
    (tmp_path / "moeclipse-of-another-program").mkdir()
    with launcher_folder() as mine, launcher_folder() as other:
        assert names(tmp_path) == sorted((mine.name, other.name, "moeclipse-of-another-program"))
        assert mine.stat().st_mode & 0o777 == 0o700
    assert names(tmp_path) == ["moeclipse-of-another-program"]


def test_what_others_put_there_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / LOCK).touch()
    (mine / "work").touch()
    (tmp_path / "moeclipse-link").symlink_to(mine)
    for name in ("pipe", "way", "folder"):
        (tmp_path / f"moeclipse-{name}").mkdir()
    os.mkfifo(tmp_path / "moeclipse-pipe" / LOCK)
    (tmp_path / "moeclipse-way" / LOCK).symlink_to(tmp_path / "made")
    (tmp_path / "moeclipse-folder" / LOCK).mkdir()
    if os.getuid() == 0:
        theirs = tmp_path / "moeclipse-theirs"
        theirs.mkdir()
        (theirs / LOCK).touch()
        os.chown(theirs, 1234, 1234)
    before = set(names(tmp_path)) - {"moeclipse-pipe"}
    run_ranks(1, come_and_go, deadline_s=20)  # of standing still: one that opens the pipe waits for ever
    assert before <= set(names(tmp_path))
    assert not (tmp_path / "made").exists()
    assert names(mine) == [LOCK, "work"]


def test_a_folder_that_is_removed_meanwhile_ends_nothing() -> None:
    with launcher_folder() as folder:
        (folder / LOCK).unlink()
        folder.rmdir()


def test_no_room_for_a_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    with (
        pytest.raises(ConfigError, match=r"no folder for temporary files can be made .* set TMPDIR"),
        launcher_folder(),
    ):
        pass
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="No such file or directory"), launcher_folder():
        pass
