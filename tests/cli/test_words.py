"""One parser for all commands: help, mistakes and exit statuses look alike, and none of it needs torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from moeclipse.cli.main import COMMANDS, main
from moeclipse.cli.words import flags_of, help_of, read
from moeclipse.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Do something."""

    runs: tuple[Path, ...] = ()
    """Folders."""
    out: Path | None = None
    """Where it goes."""
    number: int | None = None
    """How many."""
    kind: Literal["one", "other"] = "one"
    """Which."""
    only: tuple[str, ...] = ()
    """These alone."""
    loud: bool = False
    """Say more."""


def given(*words: str, **how: Any) -> Options:
    return read(Options, words, "try", **{"positional": "runs", "usage": "RUN ...", **how})


def test_words_become_values() -> None:
    found = given(
        *[
            "a",
            "--out",
            "b.html",
            "--number=-3",
            "c",
            "--only",
            "x",
            "--only",
            "y",
            "--loud",
            "--kind",
            "other",
        ]
    )
    assert found == Options(
        runs=(Path("a"), Path("c")), out=Path("b.html"), number=-3, kind="other", only=("x", "y"), loud=True
    )
    assert not given("--no-loud").loud
    assert given("-o", "b", short={"-o": "out"}).out == Path("b")
    assert given("--out", bare={"out": "here"}).out == Path("here")
    assert read(Options, ["--only", "x", "y"], "try").only == ("x", "y")


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        given("--numbr", "3", "--number", "x", "--kind", "othr", "--out")
    problems = "\n".join(caught.value.problems)
    assert "--numbr: unknown flag; did you mean --number?" in problems
    assert "--number = 'x': expected a whole number" in problems
    assert "did you mean 'other'?" in problems
    assert "--out needs PATH behind it" in problems
    with pytest.raises(ConfigError, match="more: unexpected"):
        read(Options, ["more"], "try")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        given("--help")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told == help_of(Options, "try", positional="runs", usage="RUN ...")
    assert told.startswith("usage: moeclipse try [RUN ...] [flags]\n\nDo something.\n")
    assert "  --kind one|other  which (one)\n" in told
    assert flags_of(Options)["number"].wants == "N"


@pytest.mark.parametrize("command", COMMANDS)
def test_helps_look_alike(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([command, "--help"])
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr().out
    assert status == 0
    assert told.startswith(f"usage: moeclipse {command}")
    assert "None" not in told
    assert "╭" not in told
    assert max(map(len, told.splitlines())) <= 110
    assert all(line == line.rstrip() for line in told.splitlines())


MISTAKES = {
    "report": ["/nowhere"],
    "report two": ["report", "a", "b", "--port", "x"],
    "place": ["/nowhere"],
    "place none": ["place"],
    "generate": ["/nowhere", "--prompt", "a"],
    "convert": ["/nowhere", "/tmp/out-of-nowhere"],
    "convert family": ["convert", ".", "/tmp/out-of-nowhere", "--family", "mixtrall"],
    "train": ["--ranks", "0"],
    "train files": ["train", "--data.files", "/nowhere/*.txt"],
    "train file": ["train", "/nowhere.toml"],
    "train hf": ["train", "--model.from-hf", "/nowhere"],
    "simulate": ["--ranks", "x"],
    "doctor": ["--what"],
    "completion": ["tcsh"],
    "measure": ["--what"],
    "plan": ["nothing-of-that-name"],
}
LOADS_TORCH = ("plan",)
"""Last of all: sizes of models come from a module that computes, too."""


def test_mistakes_end_with_2_and_one_error_before_torch_is_loaded() -> None:
    """In one process: whoever had imported torch would have done so for all."""
    words = [args if args[0] in COMMANDS else [name, *args] for name, args in MISTAKES.items()]
    code = (
        "import contextlib, io, sys\n"
        "from moeclipse.cli.main import main\n"
        f"for words in {words!r}:\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):\n"
        "        status = main(words)\n"
        "    assert status == 2, (words, status, said.getvalue())\n"
        "    assert said.getvalue().startswith('error: '), (words, said.getvalue())\n"
        f"    assert words[0] in {LOADS_TORCH} or 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
