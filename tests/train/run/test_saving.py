"""When a run saves; a save that fails is told and tried again; what cannot be saved any more ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeclipse.core.errors import CheckpointError
from moeclipse.train.checkpoints.async_save import AsyncSave
from moeclipse.train.run.saving import DUE, ENDED, LEAVE, MAX_FAILED, Saving
from moeclipse.train.run.survival_config import CheckpointConfig


class Bench:
    """A run of one rank whose saves are written down."""

    def __init__(self, fails: set[int] = frozenset(), **config: Any) -> None:  # type: ignore[assignment]
        self.fails, self.now = fails, 0.0
        self.begun: list[tuple[int, bool]] = []
        self.told: list[str] = []
        self.ready_at: list[float] = []
        self.leave = False
        given = {"asynchronous": False, **config}
        self.saving = Saving(
            CheckpointConfig(**given),
            self.save,
            self.told.append,
            asked_to_leave=lambda: self.leave,
            make_ready=lambda _: self.ready_at.append(self.now),
            clock=lambda: self.now,
        )

    def save(self, step: int, async_save: AsyncSave | None) -> Path:
        self.begun.append((step, async_save is not None))
        if step in self.fails:
            raise CheckpointError(f"checkpoint step {step} could not be saved: the disk is full")
        return Path(f"step-{step}")

    def steps(self, count: int, seconds: float = 1.0, last: bool = True) -> list[int]:
        for done in range(1, count + 1):
            self.now += seconds
            self.saving.after_step(done, [self.saving.signals()], last=last and done == count)
        return [step for step, _ in self.begun]


def test_by_steps_by_time_and_at_the_end() -> None:
    assert Bench(every=3).steps(7) == [3, 6, 7]
    assert Bench(every=0).steps(7) == [7]
    assert Bench(every=0, at_end=False).steps(7) == []
    assert Bench().steps(5) == [5], "ten minutes are not over"
    assert Bench(minutes=0.05).steps(10) == [3, 6, 9, 10]
    assert Bench(minutes=0.05).steps(4, seconds=60.0) == [1, 2, 3, 4]


def test_rank_0_has_the_clock() -> None:
    bench = Bench()
    bench.saving.after_step(1, [ENDED, ENDED | DUE], last=False)
    assert bench.begun == []
    bench.saving.after_step(2, [ENDED | DUE, ENDED], last=False)
    assert bench.begun == [(2, False)]


def test_saves_are_asynchronous_except_for_the_last() -> None:
    bench = Bench(every=2, asynchronous=True)
    bench.steps(5)
    assert bench.begun == [(2, True), (4, True), (5, False)]


def test_memory_is_made_ready_half_way_to_the_first_save() -> None:
    for config, seconds, first in (({"every": 8}, 1.0, 4.0), ({}, 60.0, 300.0), ({"every": 0}, 60.0, None)):
        bench = Bench(**config, asynchronous=True)
        bench.steps(20, seconds)
        assert bench.ready_at[:1] == ([] if first is None else [first])
        assert all(now < seconds * 10 for now in bench.ready_at), "before the first save"
    bench = Bench(every=8)
    bench.steps(20)
    assert bench.ready_at == [], "a save that training waits for needs none"


def test_a_job_that_is_asked_to_leave_says_so() -> None:
    bench = Bench(at_end=False)
    assert not bench.saving.leaving(1, [bench.saving.signals()])
    bench.leave = True
    assert bench.saving.leaving(1, [0, bench.saving.signals()])
    bench.saving.after_step(1, [LEAVE | ENDED], last=True)
    assert bench.begun == [(1, False)], "it saves, also where the end of the run would not be saved"


def test_a_job_that_makes_room_leaves_at_the_next_save_that_is_due() -> None:
    bench = Bench(every=4)
    bench.saving.leave_at_save = lambda: True
    told = [bench.saving.signals()]
    assert [done for done in range(1, 9) if bench.saving.leaving(done, told)] == [4, 8]
    assert not bench.saving.leaving(4, [0, 0])
    assert bench.saving.leaving(4, [0, *told]), "whichever rank heard of it"


def test_training_goes_on_and_the_next_save_counts() -> None:
    bench = Bench({2, 3, 5}, every=1)
    bench.steps(6)
    assert bench.saving.path == Path("step-6")
    assert [text[:17] for text in bench.told] == [
        "checkpoint step 2",
        "checkpoint step 3",
        "checkpoint step 5",
    ]
    assert all(text.endswith("the disk is full; training goes on") for text in bench.told)


def test_the_last_save_counts_and_the_first_failure_speaks() -> None:
    bench = Bench({2, 3}, every=1)
    with pytest.raises(CheckpointError, match=r"^checkpoint step 2 could .*; nor could 1 later ones$"):
        bench.steps(3)
    assert bench.saving.path == Path("step-1")
    assert len(bench.told) == 1


def test_a_disk_that_stays_full_ends_the_run() -> None:
    bench = Bench(set(range(10)), every=1)
    with pytest.raises(CheckpointError, match="checkpoint step 1 could not"):
        bench.steps(10)
    assert len(bench.told) == MAX_FAILED - 1
