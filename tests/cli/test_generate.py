"""`moeclipse generate` from words to text: alone, over ranks, and what it says of bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import make_run

from moeclipse.cli import generate
from moeclipse.cli.main import main
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.generate.text import TextPiece


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    run_alone(make_run, root, {})
    return root / "run"


def test_texts_are_shown_in_order() -> None:
    pieces = [
        TextPiece(row=1, text="B"),
        TextPiece(row=0, text="a"),
        TextPiece(row=1, text="C", ended="end"),
        TextPiece(row=0, text="b", ended="length"),
    ]
    shown = list(generate.in_order(("p", "q"), pieces, dim=False))
    assert "".join(shown) == "--- 1 of 2\npab\n--- 2 of 2\nqBC\n"
    assert "a" in shown, "the first is streamed"
    alone = [TextPiece(row=0, text="", ended="length")]
    assert "".join(generate.in_order(("p",), alone, dim=True)) == "\033[2mp\033[0m\n"


WORDS = ["--prompt", "ab", "c", "--max-tokens", "4", "--seed", "3"]


def test_texts_follow_their_prompts(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), *WORDS]) == 0
    alone = capfd.readouterr().out
    assert alone.startswith("--- 1 of 2\nab")
    assert "\n--- 2 of 2\nc" in alone
    assert main(["generate", str(run), *WORDS]) == 0
    assert capfd.readouterr().out == alone


@pytest.mark.full
@pytest.mark.parametrize("layout", [[], ["--tp", "2"]])
def test_ranks_write_what_one_writes(layout: list[str], run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["generate", str(run), *WORDS])
    alone = capfd.readouterr().out
    assert main(["generate", str(run), *WORDS, "--ranks", "2", *layout]) == 0
    assert capfd.readouterr().out == alone


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which model?"),
        (["RUN"], "there is no prompt; add --prompt TEXT"),
        (["RUN", "--prompt", ""], "a prompt is empty"),
        (["RUN", "--prompt", "x" * 40], "more than the 32 tokens"),
        (["RUN", "--prompt", "x", "--temperature", "warm"], "temperature = 'warm'"),
        (["RUN", "--prompt", "x", "--tp", "3", "--ranks", "3"], "tp (3) must be at most 2"),
        (["RUN", "--prompt", "x", "--ranks", "2", "--tp", "0"], "tp (0) must be at least 1"),
        (["RUN", "--prompt", "x", "--tokenizer", "none.json"], "does not exist"),
        (["nowhere", "--prompt", "x"], "no such folder"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", *(str(run) if word == "RUN" else word for word in words)])
    told = capsys.readouterr()
    assert code == 2
    assert said in told.err
    assert told.out == ""


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    for name in generate.GenerateOptions.__dataclass_fields__:
        assert name == "model" or f"--{name.replace('_', '-')}" in text
