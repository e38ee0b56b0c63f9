"""What a run writes down: lines of steps, and a summary."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from apart import apart
from moeclipse.core.errors import ConfigError
from moeclipse.train.run import metrics as metrics_module
from moeclipse.train.run.metrics import SETTLED, Metrics, is_before


def record(step: int, **changes: Any) -> dict[str, Any]:
    times = {f"{name}_ms": 10.0 * (step + 1) for name in ("step", "compute", "exposed", "straggle", "idle")}
    fixed = {"comm_ms": 40.0, "hidden_ms": 30.0, "num_tokens": 600, "tokens_per_s": 1.0}
    load = {"load": [[step, 1], [2, 3]], "dropped": 1, "skipped": step == 1}
    return {"step": step, "loss": 5.0 - step, **times, **fixed, **load, **changes}


def make(folder: Path, **changes: Any) -> Metrics:
    return Metrics(folder, **{"writes": True, "warmup_steps": 1, "tensorboard": False, **changes})


def test_the_summary_leaves_the_first_steps_out(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    for step in range(3):
        metrics.add(record(step, mean_experts=1.0 + step, balance=0.5 + 0.1 * step))
    found = metrics.summary({"extra": 7})
    assert (found["loss_first"], found["loss_last"], found["window"]) == (5.0, 3.0, "steps 1 to 2")
    assert found["step_ms"] == 25.0
    assert found["tokens_per_s"] == 600 / 0.025, "from the mean time, not the mean of speeds"
    assert (found["hidden_fraction"], found["mean_experts"]) == (0.75, 2.5)
    assert found["balance"] == pytest.approx(0.65)
    assert found["load"] == [1 + 2 + 2 * 2, 2 * (1 + 3)]
    assert (found["dropped"], found["skipped"], found["extra"]) == (3, 1, 7)
    assert json.loads((tmp_path / "summary.json").read_text()) == found
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_goal_out_of_reach_stands_in_the_lines(tmp_path: Path) -> None:
    metrics, last = make(tmp_path, mean_experts=6.0), 2 * SETTLED
    for step in range(last + 1):
        metrics.add(record(step, load=[[2000, 928], [3600, 0]], skipped=step < 1))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "notes" in line] == [last], "a skipped step moves no limit"
    assert "out of reach in layers with experts 0 (4.88)" in lines[-1]["notes"][0]


def test_a_run_shorter_than_its_warm_up_and_one_without_steps(tmp_path: Path) -> None:
    short = make(tmp_path, warmup_steps=9)
    short.add(record(4))
    assert short.summary({})["window"] == "steps 4 to 4"
    found = make(tmp_path).summary({})
    assert (found["window"], found["loss_first"], found["load"]) == ("no steps", None, [])


def test_ranks_other_than_the_first_write_nothing(tmp_path: Path) -> None:
    silent = make(tmp_path, writes=False, tensorboard=True)
    silent.add(record(0))
    silent.continue_from(0)
    assert silent.summary({})["loss_first"] == 5.0
    assert not any(tmp_path.iterdir())


def test_steps_that_run_again_are_dropped(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    for step in range(4):
        metrics.add(record(step))
    with metrics.path.open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a kill
    make(tmp_path).continue_from(2)
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [0, 1]
    assert not is_before('{"loss": 1}', 2)


def test_memory_and_lines_do_not_grow_with_steps_experts_or_ranks(tmp_path: Path) -> None:
    metrics = make(tmp_path, warmup_steps=3)
    table = {"load": [[1] * 256] * 61, "ranks": {"step_ms": [1.0] * 4096}}
    step = 0

    def steps(count: int) -> int:
        nonlocal step
        for _ in range(count):
            metrics.add(record(step, **table))
            step += 1
        gc.collect()
        return len(gc.get_objects())

    first = steps(50)
    assert steps(200) - first < 100, "something is kept for every step"
    lines = metrics.path.read_text().splitlines()
    assert len(lines) == 250
    assert len(metrics.path.read_bytes()) / len(lines) < 2 * 8 * metrics_module.MOST_NUMBERS
    assert "load" in json.loads(lines[0])
    assert "load" not in json.loads(lines[1])
    shown = [json.loads(line)["step"] for line in lines if "load" in json.loads(line)]
    assert shown == list(range(0, 250, 31)), "61 x 256 numbers, 512 a line"
    assert metrics.summary({})["load"] == [247 * 61] * 256, "sums know all of them"


def test_a_record_of_few_numbers_is_written_whole() -> None:
    small = record(1, ranks={"step_ms": [1.0, 2.0]})
    assert metrics_module.shortened(small) == small


def test_a_run_that_begins_again_keeps_what_was_written(tmp_path: Path) -> None:
    make(tmp_path).add(record(0))
    note = make(tmp_path).continue_from(0)
    assert note is not None
    assert note.endswith("metrics.1.jsonl")
    assert not (tmp_path / "metrics.jsonl").exists()
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["step"] == 0
    assert make(tmp_path).continue_from(0) is None


@apart
def on_a_full_disk(folder: Path) -> None:
    import resource
    import signal

    metrics = make(folder)
    metrics.add(record(0))
    size = metrics.path.stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
    for step in range(1, 4):
        metrics.add(record(step))
    notes = metrics.scribe.take_notes()
    assert notes == ["metrics.jsonl cannot be written: file too large; training goes on without"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    metrics.add(record(4))
    assert metrics.scribe.take_notes() == ["metrics.jsonl can be written again; 3 times it could not"]
    assert metrics.summary({})["window"] == "steps 1 to 4", "what was not written down still counts"


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path) -> None:
    on_a_full_disk(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 4], "no half line is left"


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Board:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []
            self.closed = False

        def add_scalar(self, key: str, value: float, step: int) -> None:
            self.seen.append((key, value, step))

        def close(self) -> None:
            self.closed = True

    board = Board()
    monkeypatch.setattr(metrics_module, "open_tensorboard", lambda directory: board)
    metrics = make(tmp_path, tensorboard=True)
    metrics.add(record(2))
    metrics.summary({})
    assert ("loss", 3.0, 3) in board.seen, "of the third step"
    assert not {"step", "load"} & {key for key, *_ in board.seen}
    assert board.closed


def test_tensorboard_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="needs TensorBoard; pip install"):
        make(tmp_path, tensorboard=True)


def test_totals_are_of_the_whole_run(tmp_path: Path) -> None:
    """After a resume, and after going back to a step: what is run again counts once."""
    first = make(tmp_path)
    for step in range(4):
        first.add(record(step))
    first.continue_from(2)
    first.add(record(2))
    assert [first.summary({})[key] for key in ("loss_first", "dropped", "skipped")] == [5.0, 3, 1]
    resumed = make(tmp_path)
    resumed.continue_from(3)
    resumed.add(record(3))
    assert [resumed.summary({})[key] for key in ("loss_first", "dropped", "skipped")] == [5.0, 4, 1]
