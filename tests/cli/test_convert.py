"""`moeclipse convert`: which way, words, and what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny

from moeclipse.cli.convert import find_checkpoint, read_words
from moeclipse.cli.main import main
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.testing.run_ranks import run_alone


def test_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, ours, theirs = tmp_path / "source", tmp_path / "ours", tmp_path / "theirs"
    run_alone(lambda _: write_tiny("olmoe", source))
    assert main(["convert", str(source), str(ours)]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert not ours.exists()
    assert main(["convert", str(source), str(ours), "--no-tokenizer"]) == 0
    assert "OLMoE: " in capsys.readouterr().out
    assert main(["convert", str(ours), str(theirs), "--dtype", "bfloat16"]) == 0
    assert (theirs / "config.json").exists()
    assert main(["convert", str(ours), str(theirs)]) == 2
    error = capsys.readouterr().err
    assert "exists; choose another folder" in error
    assert error.count("\n") == 1


def test_words() -> None:
    options, source, out = read_words(["a", "--dtype", "float16", "b", "--tokenizer", "."])
    assert (options.dtype, options.tokenizer, str(source), str(out)) == ("float16", ".", "a", "b")
    with pytest.raises(ConfigError, match="takes two folders, SOURCE and OUT, not 1"):
        read_words(["a"])
    with pytest.raises(ConfigError, match="dtype"):
        read_words(["a", "b", "--dtype", "int3"])
    with pytest.raises(ConfigError, match="no such folder"):
        read_words(["a", "b", "--tokenizer", "/nowhere/at/all"])


def test_help_and_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--help"]) == 0
    assert "SOURCE OUT" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="there is no such folder"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        find_checkpoint(tmp_path)
