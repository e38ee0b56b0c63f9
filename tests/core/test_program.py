"""Commands that are printed can be pasted into the shell that they are printed in."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from moeclipse.core.program import command, program


def test_a_printed_command_is_found_by_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    assert program() == f"{binaries / 'python'} -m moeclipse"
    script = binaries / "moeclipse"
    script.touch(mode=0o755)
    assert program() == ".venv/bin/moeclipse"
    monkeypatch.chdir(binaries)
    assert program() == "moeclipse" or Path(program()).is_file()
    monkeypatch.chdir("/")
    assert Path(program()).is_file()
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path / "far")
    assert program() == str(script), "not ../.venv/bin/moeclipse, which holds here alone"
    monkeypatch.setenv("PATH", str(binaries))
    assert program() == "moeclipse"


def test_folders_with_spaces_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "my tools" / "moeclipse"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.parent / "python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    shown = command("train", Path("runs/a run") / "config.toml", "--run.steps", 2)
    assert shlex.split(shown) == ["my tools/moeclipse", "train", "runs/a run/config.toml", "--run.steps", "2"]
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path / "far")
    assert shlex.split(program()) == [str(script)]
    script.unlink()
    assert shlex.split(program()) == [str(script.parent / "python"), "-m", "moeclipse"]
