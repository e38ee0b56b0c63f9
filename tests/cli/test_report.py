"""`moeclipse report`: a page, numbers, conditions and their exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import make_run

from moeclipse.cli.main import main
from moeclipse.cli.report import numbers_of
from moeclipse.report.run import read_run

Capture = pytest.CaptureFixture[str]


def test_a_page_is_written_into_the_run(tmp_path: Path, capsys: Capture) -> None:
    folder = make_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {folder / 'report.html'}\n"
    assert "made - MoEclipse" in (folder / "report.html").read_text()
    other = make_run(tmp_path / "other", name="before")
    assert main(["report", str(folder), str(other), "--out", str(tmp_path / "both.html")]) == 0
    assert "made and before - MoEclipse" in (tmp_path / "both.html").read_text()


def test_numbers_for_a_script(tmp_path: Path, capsys: Capture) -> None:
    folder = make_run(tmp_path / "run", grad_norm=float("nan"))
    assert main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == numbers_of([read_run(folder)])
    assert told["runs"][0]["measures"]["grad_norm"] is None
    assert told["runs"][0]["advice"][0]["setting"] == "--placement.planner auto"
    assert not (folder / "report.html").exists()


def test_conditions_decide_the_exit_status(tmp_path: Path, capsys: Capture) -> None:
    folder, before = make_run(tmp_path / "run"), make_run(tmp_path / "before", tokens_per_s=1e6)
    assert main(["report", str(folder), "--fail-if", "exposed > 50%"]) == 0
    assert capsys.readouterr().err == ""
    words = [
        "report",
        str(folder),
        str(before),
        "--fail-if",
        "tokens_per_s < 0.95 * RUN2",
        "--fail-if",
        "loss > 9",
    ]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("failed: tokens_per_s < 0.95 * RUN2: tokens_per_s is ")
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--fail-if", "exposd > 1"], "did you mean exposed?"),
        (["--fail-if", "loss > RUN2"], "RUN2 is not given"),
        (["--out", "/nowhere/at/all.html"], "no folder /nowhere/at"),
        (["--live", "--json"], "--live serves a page"),
        (["--port", "70000"], "must be between"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture, words: list[str], why: str) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    assert main(["report", str(folder), *words]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


def test_any_number_of_runs_is_one_page(tmp_path: Path, capsys: Capture) -> None:
    folders = [str(make_run(tmp_path / f"run{number}", steps=4, name=f"run{number}")) for number in range(4)]
    assert main(["report", *folders]) == 0
    page = (tmp_path / "run0" / "report.html").read_text()
    assert "run0, run1, run2 and run3 - MoEclipse" in page
    assert main(["report"]) == 2
    assert "the folder of a run" in capsys.readouterr().err
