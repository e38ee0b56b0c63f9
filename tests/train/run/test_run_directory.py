"""A run directory is opened by all ranks or by none, and stays as it was where a resume is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_trainer import configure, finish

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.run.run_directory import RunDirectory
from moeclipse.train.run.run_files import append_line
from moeclipse.train.run.trainer import Run, Silence


def opened(mesh: Mesh, folder: str, resume: str, taken: bool = False) -> str:
    run, told = RunDirectory(Path(folder), mesh, wait_s=0.2), []
    other = RunDirectory(Path(folder), Mesh.single(), wait_s=0.2)
    try:
        if taken and mesh.rank == 0:
            with other.held("auto", told.append):
                return opened(mesh, folder, resume)
        with run.held(resume, told.append):
            before = sorted(os.listdir(folder))
            run.accept("steps = 3\n")
            run.check_job()
            run.scribe.do("notes.txt", lambda: (Path(folder) / "notes.txt").write_text("x") and None)
        return f"{before} {sorted(os.listdir(folder)) if mesh.rank == 0 else ''}"
    except ConfigError as error:
        return f"refused: {error}"


def test_all_ranks_enter_and_nothing_is_left_of_the_job(tmp_path: Path) -> None:
    folder = str(tmp_path / "runs" / "run")
    found = run_ranks(2, opened, folder, "off")
    assert found[0] == "['job.json'] ['config.toml', 'notes.txt']", "config.toml comes when it is accepted"
    assert (Path(folder) / "config.toml").read_text() == "steps = 3\n"
    for text in run_ranks(2, opened, folder, "off"):
        assert text.startswith("refused: run directory ")
        assert "exists; continue it with --resume auto" in text
    assert run_ranks(2, opened, folder, "auto")[0].startswith("['config.toml', 'job.json', 'notes.txt']")


def test_another_job_keeps_all_ranks_out(tmp_path: Path) -> None:
    for text in run_ranks(2, opened, str(tmp_path / "run"), "auto", True):
        assert text.startswith("refused: ")
        assert "is in use by process" in text
    assert os.listdir(tmp_path / "run") == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in run_ranks(2, opened, str(tmp_path / "file" / "run"), "auto"):
        assert "cannot be written" in text
        assert "choose another --run.dir" in text


def test_a_refused_resume_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.steps": 2})
    run_alone(finish, config)
    directory = tmp_path / "runs" / "run"
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    other = with_values(config, {"model.d_model": 32})
    with pytest.raises(CheckpointError, match="belongs to another model"):
        Run(other, Mesh.single(), Silence()).whole("auto")
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


@pytest.mark.parametrize(("shared", "modes"), [(False, (0o700, 0o600)), (True, (0o755, 0o644))])
def test_files_are_their_users_alone_unless_they_are_shared(
    tmp_path: Path, shared: bool, modes: tuple[int, int]
) -> None:
    before = os.umask(0o022)
    try:
        run = RunDirectory(tmp_path / "run", Mesh.single(), wait_s=0.2, shared=shared)
        with run.held("off", print):
            run.accept("[run]")
            append_line(run.path / "metrics.jsonl", "{}")
        paths = (run.path, run.path / "config.toml", run.path / "metrics.jsonl")
        assert [path.stat().st_mode & 0o777 for path in paths] == [modes[0], modes[1], modes[1]]
        assert os.umask(0o022) == 0o022, "it is as it was"
    finally:
        os.umask(before)
