"""The last lines of a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_runs import make_run
from rich.console import Console

from moeclipse.cli import page_line
from moeclipse.cli.page_line import page_lines, tell_page


def test_a_run_ends_with_advice_and_its_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    out = io.StringIO()
    tell_page(folder, Console(file=out, soft_wrap=True))
    skew, first, second, last = out.getvalue().splitlines()
    assert skew == "skew      ranks at 0.88, which cost 8.5 ms of waiting a step (7 %)"
    assert first.startswith("advice    --placement.planner auto: wins at most 7 % of a step (8.5 ms); ")
    assert second.startswith("          --moe.schedule auto: wins at most 5 % of a step")
    assert last == f"page      {folder / 'report.html'}"
    assert (folder / "report.html").is_file()


def test_without_advice_there_is_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=1, balance=None)
    assert page_lines(folder) == [("page", str(folder / "report.html"))]


def test_what_goes_wrong_is_said_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((label, text),) = page_lines(tmp_path / "it's gone")
    assert label == "page"
    assert text.startswith("could not be written")
    assert "moeclipse report '" in text
    folder = make_run(tmp_path / "run", ranks=1)
    (folder / "report.html").mkdir()
    assert page_lines(folder)[-1][1].startswith("could not be written")
    monkeypatch.setattr(page_line, "MOST_BYTES", 10)
    assert page_lines(folder) == [("page", f"moeclipse report {folder}")]
