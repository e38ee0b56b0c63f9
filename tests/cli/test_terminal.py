"""No word of others drives the terminal, whichever command shows it; what we send ourselves goes through."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from moeclipse.cli.display import Display
from moeclipse.cli.main import main
from moeclipse.cli.terminal import terminal

ESCAPE = "\x1b]0;title\x07\x1b[2J"
DRIVES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def drawn(draw: Callable[..., object], **more: object) -> str:
    out = io.StringIO()
    draw(terminal(file=out, width=80, **more))
    return out.getvalue()


def test_neither_escapes_nor_markup_of_a_text_are_obeyed() -> None:
    table = Table("a column")
    table.add_row(f"[bold]cell{ESCAPE}")
    text = drawn(lambda on: (on.print(f"run [/red] {ESCAPE}"), on.print(Text(ESCAPE)), on.print(table)))
    assert not DRIVES.search(text)
    assert r"run [/red] \x1b]0;title" in text
    assert r"[bold]cell\x1b]0;tit" in text


def test_colours_and_cursor_of_ours_go_through() -> None:
    def draw(on: object) -> None:
        on.print("ours", style="bold")  # type: ignore[attr-defined]
        with Progress(console=on) as progress:  # type: ignore[arg-type]
            progress.add_task(f"at {ESCAPE}", total=2)

    text = drawn(draw, force_terminal=True, _environ={"TERM": "xterm"})
    assert "\x1b[1mours\x1b[0m" in text
    assert "\x1b[?25l" in text, "the cursor is hidden while a bar moves"
    assert "\x1b]0;" not in text
    assert "\x1b[2J" not in text


def test_a_run_shows_names_and_notes(tmp_path: Path) -> None:
    def draw(on: object) -> None:
        display = Display(on)  # type: ignore[arg-type]
        display.start({"name": f"run{ESCAPE}", "steps": 1, "corpus": f"{ESCAPE}.txt"})
        display.note(f"column {ESCAPE} is left out")

    text = drawn(draw)
    assert text.count(r"\x1b]0;title") == 3
    assert not DRIVES.search(text)


def hostile_files(folder: Path) -> dict[str, list[str | Path]]:
    """Commands, by what of theirs is hostile."""
    name = folder / f"n{ESCAPE}\nerror: all is well [red]"
    raw = folder / os.fsdecode(b"caf\xe9")
    key, hf, run = folder / "key.toml", folder / "hf", folder / "run"
    key.write_text(f'"{json.dumps(ESCAPE)[1:-1]}" = 1\n')
    for made in (hf, run, name, raw):
        made.mkdir()
    (hf / "config.json").write_text(json.dumps({"model_type": ESCAPE}))
    for made in (run, name, raw):
        (made / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, "step_ms": 5.0}) + "\n")
    (run / "summary.json").write_text(json.dumps({"name": ESCAPE, "window": ESCAPE, "directory": ESCAPE}))
    order = folder / "order.csv"
    order.write_text(ESCAPE)
    loads = folder / f"{ESCAPE}.npz"
    np.savez(loads, **{f"{ESCAPE}": np.zeros(3)})
    return {
        "report of a name": ["report", name],
        "report of bytes": ["report", raw],
        "report of a summary": ["report", run, "--fail-if", f"{ESCAPE} > 1"],
        "report and condition": ["report", run, "--fail-if", "loss > 0.5"],
        "json": ["report", run, "--json"],
        "simulate a key": ["simulate", key],
        "plan a key": ["plan", key],
        "plan a model": ["plan", hf],
        "skew a key": ["skew", key],
        "skew a name": ["skew", name],
        "place a name": ["place", name],
        "place loads": ["place", loads],
        "order": ["simulate", "--from-csv", order],
        "order written": ["simulate", "--ranks", "2", "--microbatches", "2", "--csv", folder / f"{raw}.csv"],
        "convert a model": ["convert", hf, folder / "out"],
        "convert a name": ["convert", name, folder / "out"],
        "generate": ["generate", hf, "--prompt", "x"],
        "train a key": ["train", key],
        "train a name": ["train", "--run.name", f"{ESCAPE}\n", "--print-config"],
        "train a file": ["train", "--data.files", f"{ESCAPE}.txt"],
        "a command": [f"{ESCAPE}"],
        "a flag": ["plan", f"--{ESCAPE}"],
    }


def test_no_command_hands_words_of_others_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for what, words in hostile_files(tmp_path).items():
        status = main([str(word) for word in words])
        told = capfd.readouterr()
        assert status in (0, 1, 2), what
        assert not DRIVES.search(told.out + told.err), (what, told)
        lines = told.err.splitlines()
        assert "error: all is well [red]" not in [line[:26] for line in lines], what
        assert status != 2 or lines[0].startswith("error: "), (what, told)
