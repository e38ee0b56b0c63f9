"""`moeclipse convert`: which way, words, and what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny

from moeclipse.cli.convert import find_checkpoint
from moeclipse.cli.main import main
from moeclipse.core.errors import CheckpointError
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a"], "takes two folders, SOURCE and OUT, not 1"),
        (["a", "b", "--dtype", "int3"], "--dtype = 'int3': expected one of keep, "),
        (["a", "b", "--tokenizer", "/nowhere/at/all"], "no such folder"),
        (["a", "b", "--family", "mixtrall"], "did you mean mixtral?"),
        (["/nowhere/a", "--dtype", "float16", "b"], "/nowhere/a: there is no such folder"),
    ],
)
def test_what_is_wrong_with_words_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"has no whole checkpoint: step-00000002: manifest.json is"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no checkpoint; give the folder of a run, of a"):
        find_checkpoint(tmp_path / "checkpoints" / "step-00000002")
