"""Runs of unequal length, where both had come as far."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make_run, record_of, write_lines

from moeclipse.report.equal import equal
from moeclipse.report.figures import figures, marks
from moeclipse.report.run import RunData, read_run


def run_of(folder: Path, steps: int, tokens: int, **more: float) -> RunData:
    make_run(folder, steps=3)
    write_lines(
        folder / "metrics.jsonl",
        [record_of(step, loss=float(step), num_tokens=tokens, **more) for step in range(steps)],
    )
    return read_run(folder)


def test_runs_are_compared_where_all_have_come_to(tmp_path: Path) -> None:
    """40 steps of 100 tokens and 30 of 200: 30 steps are common, and 4,000 tokens: 20 steps of the second."""
    found = equal([run_of(tmp_path / "a", 40, 100), run_of(tmp_path / "b", 30, 200)])
    assert (found["step"]["at"], found["step"]["same"]) == (30, False)
    assert [one["loss"] for one in found["step"]["runs"]] == [28.0, 28.0], "steps 27 to 29 of either"
    assert [one["tokens"] for one in found["step"]["runs"]] == [3000, 6000]
    assert found["tokens"]["at"] == 4000
    assert [one["step"] for one in found["tokens"]["runs"]] == [40, 20]
    assert [one["loss"] for one in found["tokens"]["runs"]] == [37.5, 18.5]
    assert found["tokens"]["runs"][0]["seconds"] == pytest.approx(40 * 0.128, rel=0.05)


def test_held_out_losses_say_where_they_were_taken(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", 10, 100)
    lines = [
        record_of(step, **({"eval_loss": 5.0 - step} if step in (2, 4, 8) else {})) for step in range(10)
    ]
    write_lines(tmp_path / "a" / "metrics.jsonl", lines)
    (first, _) = equal([read_run(tmp_path / "a"), run_of(tmp_path / "b", 7, 100)])["step"]["runs"]
    assert (first["eval_loss"], first["eval_at"]) == (1.0, 5.0), "step 5, the last before step 7"
    assert run.steps.num_steps == 10


def test_what_a_run_did_not_measure_is_no_axis(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a", 10, 100), run_of(tmp_path / "b", 10, 100)
    write_lines(tmp_path / "b" / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in range(10)])
    found = equal([first, read_run(tmp_path / "b")])
    assert list(found) == ["step"]
    assert found["step"]["same"]
    assert found["step"]["runs"][1]["seconds"] is None
    assert equal([second]) == {}


def test_a_long_run_counts_the_tokens_of_all_its_steps(tmp_path: Path) -> None:
    """Neighbours that are one row count as often as there are."""
    long, short = run_of(tmp_path / "a", 10_100, 10), run_of(tmp_path / "b", 5000, 10)
    (first, second) = equal([long, short])["tokens"]["runs"]
    assert (first["step"], second["step"]) == (5000, 5000)
    (figure, _) = figures([long, short])["runs"]
    assert figure["curves"]["tokens"][-1] > 1e5


def test_any_number_of_runs_has_marks() -> None:
    assert marks(3) == ["A", "B", "C"]
    assert len(set(marks(100))) == 100
    assert marks(27)[-1] == "A2"
