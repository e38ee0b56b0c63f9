"""A rank that is slow for many steps is named, with what its experts have to do with it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from test_trainer import Notes, configure

from moeclipse.comm.mesh import Mesh
from moeclipse.model.attention import GroupedQueryAttention as Attention
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.step_times import STEPS, Stragglers
from moeclipse.train.run.trainer import Run


def named(stragglers: Stragglers, times: list[float], steps: int, rows: list[int] | None = None) -> list[int]:
    """The steps after which somebody was named."""
    return [step for step in range(1, steps + 1) if stragglers.add(step, times, rows)]


def test_a_slow_rank_is_named_after_many_steps_and_then_ever_less_often() -> None:
    stragglers = Stragglers(peers=[(0, 1, 2)])
    assert named(stragglers, [10, 10, 14], 8 * STEPS - 1) == [STEPS, 2 * STEPS, 4 * STEPS]
    (found,) = stragglers.add(999, [10, 10, 14])
    assert (found["rank"], found["step"]) == (2, 999)
    assert "rank 2 computes 1.40 times as long as the others (14 ms against 10)" in found["what"]


def test_a_little_slower_is_nothing() -> None:
    assert named(Stragglers(peers=[(0, 1)]), [10, 12], 1000) == []


def test_a_step_that_is_as_quick_as_others_counts_off_two() -> None:
    stragglers = Stragglers(peers=[(0, 1)])
    for step in range(1000):
        assert not stragglers.add(step, [10, 20 if step % 3 else 10])
    assert named(stragglers, [10, 20], 2 * STEPS)[0] >= STEPS - 2
    assert named(stragglers, [10, 10], 2 * STEPS) == []
    assert named(stragglers, [10, 20], STEPS) == [STEPS], "told anew once it had recovered"


def test_a_rank_that_recovers_now_and_then_is_named() -> None:
    stragglers = Stragglers(peers=[(0, 1)])
    steps = [step for step in range(1, 200) if stragglers.add(step, [10, 20 if step % 6 else 10])]
    assert steps
    assert steps[0] < 6 * STEPS, "five slow steps count more than a quick one"


def test_a_rank_is_held_against_the_others_alone() -> None:
    assert named(Stragglers(peers=[(0, 1)]), [10, 14], STEPS) == [STEPS], "their mean is 12"


def test_stages_are_not_held_against_each_other() -> None:
    assert named(Stragglers(peers=[(0, 1), (2, 3)]), [10, 10, 50, 50], 100) == []
    assert named(Stragglers(peers=[(0,), (1,)]), [10, 50], 100) == []


def test_rows_explain_it_or_do_not() -> None:
    for rows, words in (
        ([100, 200], "its experts have 2.00 times the rows of the others"),
        ([100, 100], "look at its machine"),
        ([0, 10], "its experts have all rows"),
        (None, "look at its machine"),
    ):
        stragglers = Stragglers(peers=[(0, 1)])
        named(stragglers, [10, 20], STEPS - 1, rows)
        (found,) = stragglers.add(STEPS, [10, 20], rows)
        assert words in found["what"]


def held_up(mesh: Mesh, config: TrainConfig) -> list[str]:
    """A run in which rank 1 takes its time."""
    forward, notes = Attention.forward, Notes()

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1 * (mesh.rank == 1))
        return forward(self, *args, **kwargs)

    Attention.forward = slow  # type: ignore[method-assign]
    Run(config, mesh, notes).whole("off")
    return [text for text in notes.texts if "times as long" in text]


def test_a_run_names_its_slow_rank_and_keeps_the_record(tmp_path: Path) -> None:
    config = configure(tmp_path, **{"run.steps": STEPS + 3, "checkpoint.every": 0})
    notes, others = run_ranks(2, held_up, config)
    assert len(notes) == 1
    assert others == notes, "each rank knows; the launcher lets rank 0 alone say so"
    assert "rank 1 computes " in notes[0]
    kept = (tmp_path / "runs" / config.run.name / "incidents.jsonl").read_text().splitlines()
    (record,) = [json.loads(line) for line in kept]
    assert (record["kind"], record["rank"], record["what"]) == ("straggler", 1, notes[0])
    metrics = (tmp_path / "runs" / config.run.name / "metrics.jsonl").read_text().splitlines()
    assert all(sum(json.loads(line)["ranks"]["rows"]) > 0 for line in metrics)
