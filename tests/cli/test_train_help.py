"""The first page of help: short, true, and with the values that a run would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.cli.main import main
from moeclipse.cli.train import TrainCommand
from moeclipse.cli.train_help import MOST_WANTED, short_help
from moeclipse.core.config import keys_of, with_values
from moeclipse.train.presets import load


def test_twenty_lines_of_flags_that_exist() -> None:
    lines = short_help(load(preset="small"), "small").splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    for flag, key, _ in MOST_WANTED:
        name = flag.split()[0].removeprefix("--").replace("-", "_")
        assert name in keys_of(TrainCommand)
        assert key in ("", name)


def test_values_are_those_of_the_run(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[optim]\nlr = 0.123\n")
    for flag in ("--help", "-h"):
        assert main(["train", "mine.toml", "--run.steps", "77", flag]) == 0
        text = capsys.readouterr().out
        assert "0.123" in text
        assert "77" in text
        assert "--help-all" in text
    files = with_values(load(), {"data.files": ("corpus/a.txt", "corpus/b.txt")})
    assert "corpus/a...." in short_help(files, "")
