"""The dispatch table: quick answers, hints for typos, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moeclipse import __version__
from moeclipse.cli.main import COMMANDS, main
from moeclipse.core.errors import CheckpointError, ConfigError, StorageError


def test_help_lists_every_command(capsys: pytest.CaptureFixture) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(f"  {name}" in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moeclipse {__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean 'train'?"),
        ("docter", "did you mean 'doctor'?"),
        ("xyz", "choose one of train, "),
    ],
)
def test_unknown_command(capsys: pytest.CaptureFixture, word: str, hint: str) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err.startswith(f"error: unknown command {word!r}; {hint}")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError(["a is wrong", "b too"]), 2, "error: 2 problems:\n  - a is wrong"),
        (CheckpointError("damaged"), 2, "error: damaged\n"),
        (StorageError("not written"), 1, "error: not written\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_one_text_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, error: BaseException, code: int, text: str
) -> None:
    def fail(words: list[str]) -> int:
        raise error

    monkeypatch.setattr("moeclipse.cli.train.main", fail)
    assert main(["train"]) == code
    assert capsys.readouterr().err.startswith(text)


def test_a_missing_package_of_the_command_line_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr("moeclipse.cli.main.importlib.import_module", missing)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "error: `moeclipse train` needs rich; run: pip install rich\n"


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_answers_at_once_and_without_torch(flag: str) -> None:
    """What takes the time of a start is what is imported: some 120 modules of Python's own and ours."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "moeclipse", flag], capture_output=True, text=True
    )
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "moeclipse.cli.main" in imported
    assert not {"torch", "numpy", "rich"} & imported
    assert len(imported) < 180


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m moeclipse train --print-config | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_of_ranks_that_find_the_same_fault_one_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchrun starts them: each reads the configuration, and all end with 2."""
    said = []
    for rank, word in enumerate(("9", "9", "7")):
        own = tmp_path / str(rank)
        own.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own / "error.json"))
        place = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "job"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        assert main(["train", "--moe.num-experts", "6", "--parallel.ep", "3", "--gate.top-k", word]) == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith("error: gate.top_k (9) must be at most moe.num_experts (6)")
    assert said[1] == ""
    assert said[2].startswith("error: gate.top_k (7)"), "what only one rank finds is told"


MISTAKES = (
    ("simulate", "nowhere"),
    ("simulate", "--ranks", "0"),
    ("plan",),
    ("plan", "nowhere", "--gpus", "8"),
    ("plan", "--model", "deepseek-v3", "--gpus", "0"),
    ("place", "nowhere"),
    ("place", "nowhere", "--seconds", "-1"),
    ("report",),
    ("report", "nowhere"),
    ("convert", "nowhere", "out"),
    ("generate", "nowhere", "--prompt", "x"),
    ("doctor", "--nope"),
    ("completion", "csh"),
    ("train", "--ranks", "0"),
    ("train", "nofile.toml"),
)


def test_mistakes_of_every_command_are_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """Which takes seconds, on a busy machine a minute."""
    code = "import sys; from moeclipse.cli.main import main\n"
    code += f"for words in {MISTAKES!r}: print(main(list(words)), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["2 False"] * len(MISTAKES)
    assert "the flags are --dir, --json" in done.stderr, "a command without sections names its flags"
    assert "--seconds (-1) must not be negative" in done.stderr
