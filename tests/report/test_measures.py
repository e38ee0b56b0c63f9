"""A run in a few numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import make_run, record_of, write_lines

from moeclipse.report.measures import ABOUT, PARTS, in_words, measures_of
from moeclipse.report.run import read_run


def test_parts_add_up_and_warmup_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    slow = {"step_ms": 9e9, "compute_ms": 9e9}
    write_lines(
        folder / "metrics.jsonl", [record_of(step, **(slow if step < 3 else {})) for step in range(20)]
    )
    found = measures_of(read_run(folder))
    assert list(found) == list(ABOUT)
    assert found["step_ms"] is not None
    assert found["step_ms"] < 200
    assert sum(found[part] or 0 for part in PARTS) == pytest.approx(1)
    assert found["hidden"] == pytest.approx(14 / 20)
    assert found["skipped"] == 0
    assert found["mfu"] is None


def test_the_last_loss_held_out_and_the_best_differ(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    losses = {2: 3.0, 5: 2.0, 8: 2.5}
    records = [
        record_of(step, **({"eval_loss": losses[step]} if step in losses else {})) for step in range(10)
    ]
    write_lines(folder / "metrics.jsonl", records)
    found = measures_of(read_run(folder))
    assert (found["eval_loss"], found["eval_best"]) == (2.5, 2.0)
    assert found["loss"] == pytest.approx(0.5)
    assert found["loss_first"] == 5.0


def test_without_lines_the_summary_speaks(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    told = {"step_ms": 100.0, "exposed_ms": 25.0, "hidden_fraction": 0.5, "tokens_per_s": 7.0}
    (folder / "summary.json").write_text(json.dumps(told))
    found = measures_of(read_run(folder))
    assert (found["exposed"], found["hidden"], found["tokens_per_s"]) == (0.25, 0.5, 7.0)
    assert found["straggle"] is None


def test_numbers_are_said_with_their_unit() -> None:
    assert in_words("exposed", 0.125) == "12.5 %"
    assert in_words("step_ms", 1234.56) == "1,234.6 ms"
    assert in_words("tokens_per_s", 12345.6) == "12,346"
    assert in_words("loss", 2.34567) == "2.346"
    assert in_words("mfu", None) == "not measured"


def test_what_is_counted_is_counted_from_the_first_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    records = [record_of(step, dropped=5, skipped=step < 2) for step in range(10)]
    write_lines(folder / "metrics.jsonl", records)
    found = measures_of(read_run(folder))
    assert (found["dropped"], found["skipped"]) == (50, 2), "warm-up is for times alone"
