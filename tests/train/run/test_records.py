"""Records become whole when their times come, before a save at the latest, and none is lost in a failure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeclipse.train.observe.step_times import TIMES, StepTold
from moeclipse.train.run.metrics import Metrics
from moeclipse.train.run.records import Records


class Times:
    """Tells of a step two steps later, or when it is asked to settle."""

    def __init__(self) -> None:
        self.behind: list[int] = []
        self.ready: list[StepTold] = []

    def after(self, step: int) -> None:
        self.behind.append(step)
        while len(self.behind) > 2:
            self._tell()

    def settle(self) -> None:
        while self.behind:
            self._tell()

    def _tell(self) -> None:
        step = self.behind.pop(0)
        means = {f"{name}_ms": 10.0 + step for name in (*TIMES, "hidden")}
        slow = {"stragglers": [{"what": f"step {step}: rank 1 is slow"}]} if step == 1 else {}
        self.ready.append(StepTold(step, {**means, "hidden_fraction": 1.0, "ranks": {}, **slow}))

    def take(self) -> list[StepTold]:
        ready, self.ready = self.ready, []
        return ready


class Bed:
    def __init__(self, folder: Path) -> None:
        self.times, self.notes = Times(), list[str]()
        self.metrics = Metrics(folder, writes=True, warmup_steps=0, tensorboard=False)
        learner: Any = SimpleNamespace(times=self.times, layers=[])
        self.records = Records(learner, self.metrics, self.notes.append, lambda ms: {"mfu": ms / 100})

    def step(self, step: int) -> None:
        self.times.after(step)
        record = {"step": step, "loss": 1.0, "num_tokens": 5, "step_ms": 1.0, "tokens_per_s": 5000.0}
        self.records.after_step({**record, "load": [[1, 1]], "skipped": False, "dropped": 0})

    def lines(self) -> list[dict[str, Any]]:
        self.metrics.scribe.flush()
        path = self.metrics.path
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_a_line_is_written_when_its_times_are_known(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    with bed.records.to_the_end():
        for step in range(4):
            bed.step(step)
        assert [line["step"] for line in bed.lines()] == [0, 1]
        bed.records.settle()
        assert [line["step"] for line in bed.lines()] == [0, 1, 2, 3], "before a checkpoint"
        bed.step(4)
    found = bed.lines()
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4], "and at the end"
    assert [line["step_ms"] for line in found] == [10.0, 11.0, 12.0, 13.0, 14.0], "of all ranks"
    assert found[1]["tokens_per_s"] == pytest.approx(1e3 * 5 / 11)
    assert found[1]["mfu"] == pytest.approx(0.11)
    assert bed.metrics.window.count == 5
    assert bed.notes == ["step 1: rank 1 is slow"]
    assert "rank 1 is slow" in (tmp_path / "incidents.jsonl").read_text()


def test_a_run_that_fails_leaves_what_is_known(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    for step in range(3):
        bed.step(step)
    with pytest.raises(RuntimeError), bed.records.to_the_end():
        raise RuntimeError
    found = bed.lines()
    assert [line["step"] for line in found] == [0, 1, 2]
    assert [line["step_ms"] for line in found] == [10.0, 1.0, 1.0], "of its own clock alone"
    assert bed.metrics.window.count == 1


def test_steps_that_are_run_again_are_not_mixed_up(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    bed.step(0)
    bed.times.after(7)  # of a step that nobody waits for any more
    bed.records.settle()
    assert [line["step"] for line in bed.lines()] == [0]
