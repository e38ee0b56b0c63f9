"""The last lines of a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_runs import CONFIG, make_run, record_of
from rich.console import Console

from moeclipse.cli import page_line
from moeclipse.cli.display import summary_lines
from moeclipse.cli.page_line import page_lines, tell_page
from moeclipse.core.program import program
from moeclipse.report.figures import figures
from moeclipse.report.measures import ABOUT
from moeclipse.report.run import read_run
from moeclipse.train.run.metrics import Metrics


def test_a_run_ends_with_advice_and_its_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    out = io.StringIO()
    tell_page(folder, Console(file=out, soft_wrap=True))
    skew, first, second, last = out.getvalue().splitlines()
    assert skew == "skew      ranks at 0.88, which cost at least 8.41 ms of waiting a step (7 %)"
    assert first.startswith("advice    --placement.planner auto: wins at most 7 % of a step (8.41 ms); ")
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
    assert f"{program()} report '" in text
    folder = make_run(tmp_path / "run", ranks=1)
    (folder / "report.html").mkdir()
    assert page_lines(folder)[-1][1].startswith("could not be written")
    monkeypatch.setattr(page_line, "MOST_BYTES", 10)
    assert page_lines(folder) == [("page", f"{program()} report {folder}")]


def recorded(folder: Path, starts: tuple[int, ...]) -> dict[str, float]:
    """A run of 30 steps that began at step 0 and was resumed at others; its summary. Some steps are slow."""
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(name="made", steps=30))
    summary: dict[str, float] = {}
    for start, stop in zip(starts, (*starts[1:], 30), strict=True):
        metrics = Metrics(folder, writes=True, warmup_steps=3, tensorboard=False)
        metrics.continue_from(start)
        for step in range(start, stop):
            slow = 1 + 3 * (step % 10 == 0)
            record = record_of(step)
            times = {name: slow * value for name, value in record.items() if name.endswith("_ms")}
            speed = {"tokens_per_s": 2048e3 / times["step_ms"], "mfu": 10 / times["step_ms"]}
            record |= (
                times | speed | {"of_limit": 20 / times["step_ms"], "dropped": step, "skipped": step == 7}
            )
            metrics.add(record)
        mean_ms = metrics.window.means()["step_ms"]
        summary = metrics.summary({"mfu": 10 / mean_ms, "of_limit": 20 / mean_ms})
    return summary


@pytest.mark.parametrize("starts", [(0,), (0, 12)])
def test_terminal_and_page_say_one_number_under_one_name(tmp_path: Path, starts: tuple[int, ...]) -> None:
    summary = recorded(tmp_path / "run", starts)
    (page,) = figures([read_run(tmp_path / "run")])["runs"]
    both = {name for name in ABOUT if name in summary}
    assert both >= {
        "step_ms",
        "tokens_per_s",
        "exposed_ms",
        "hidden_ms",
        "balance",
        "mfu",
        "dropped",
        "skipped",
    }
    for name in both:
        assert page["measures"][name] == pytest.approx(summary[name], rel=1e-3), name
    assert page["measures"]["hidden"] == pytest.approx(summary["hidden_fraction"])
    first = 3 if len(starts) == 1 else 15
    assert summary["window"] == f"steps {first} to 29", "a record counts from 0"
    assert page["window"] == f"steps {first + 1} to 30", "people count from 1"
    told = "\n".join(line.plain for _, lines in summary_lines(summary, 200, True) for line in lines)
    for part in ("compute", "exposed", "straggle", "idle"):
        time_ms, share = (page["measures"][name] for name in (f"{part}_ms", part))
        assert f"{part} {time_ms:.1f} ms {100 * share:.0f} %" in told
    assert f"{page['measures']['step_ms']:.1f} ms per step" in told
    assert page["window"] in told
    (tmp_path / "run" / "summary.json").write_text('{"window": "steps 3 to 11"}')
    assert read_run(tmp_path / "run").window.sum() == 27, "a summary of an earlier start tells no window"
