"""A rank that is killed, or stands still: named, recorded, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_bed import FREEZE, KILL, POINTS, train
from moeclipse.cli.stopped_ranks import ending_frozen_ranks, stopped_children

DEADLINE_S = 10
"""Longer than ranks on busy cores need to begin."""
SMALL = ("--preset", "tiny", "--run.device", "cpu", "--run.steps", "6", "--ranks", "2")
SMALL += ("--parallel.deadline-s", str(DEADLINE_S))
PATIENCE_S = 600
"""Bounds a hang."""
PATIENT = (*SMALL[:-1], "60", "--checkpoint.every", "1")
"""Who was killed is missed at once, however long one would wait."""


@pytest.mark.parametrize(
    "point", [pytest.param(name, marks=[pytest.mark.full] * (name != "forward")) for name in POINTS]
)
def test_a_frozen_rank_is_named_and_ended(tmp_path: Path, point: str) -> None:
    words, when = POINTS[point]
    found = train(tmp_path, *SMALL, *words, fault=f"1 {FREEZE} {when}", patient_agent=True)
    assert found.code == 1
    last = found.err.strip().splitlines()[-1]
    assert last.startswith(f"error: rank 0 waited {DEADLINE_S} s in ")
    assert last.endswith(": rank 1 did not arrive")
    (incident,) = found.incidents
    # Nobody but us ended the frozen rank: the agent would have waited for an hour.
    assert (incident["kind"], incident["rank"]) == ("deadline", 0)
    assert incident["what"] in last
    assert list(incident["stands"]) == ["0"]
    for rank in (0, 1):
        assert f"rank {rank} on " in (found.run / "ops" / f"rank-{rank}.txt").read_text()
    assert when.split(" ", 1)[1].strip() in (found.run / "ops" / "rank-1.txt").read_text()


@pytest.mark.full
def test_a_frozen_rank_0_is_told_in_our_words_alone(tmp_path: Path) -> None:
    found = train(tmp_path, *SMALL, fault=f"0 {FREEZE} 9 dispatch S_F", patient_agent=True)
    assert found.code == 1
    (line,) = found.err.strip().splitlines()
    assert "rank 0 did not arrive" in line


def test_a_killed_rank_is_recorded_and_the_run_resumes(tmp_path: Path) -> None:
    found = train(tmp_path, *PATIENT, "--restarts", "1", fault=f"1 {KILL} 9 dispatch S_F")
    assert found.code == 0, found.err
    assert "restart 1 of 1: rank 1 was killed by SIGKILL" in found.err
    (incident,) = found.incidents
    assert (incident["kind"], incident["rank"]) == ("signal", 1)
    assert len(found.losses) == 6


def test_a_fault_that_recurs_in_its_step_ends_the_run(tmp_path: Path) -> None:
    found = train(
        tmp_path, *PATIENT, "--restarts", "9", fault=f"1 {KILL} 1 dispatch S_F.*, step 3$", attempts=9
    )
    assert found.code == 137
    *restarts, last = found.err.strip().splitlines()
    assert [line.partition(":")[0] for line in restarts] == ["restart 1 of 9", "restart 2 of 9"]
    assert last.startswith("error: rank 1 was killed by SIGKILL")
    assert last.endswith("; in step 4 for the 3rd time in a row: a restart does not help")
    assert [(record["rank"], record["step"]) for record in found.incidents] == [(1, 3)] * 3
    assert len(found.losses) == 3


def test_a_stopped_child_is_ended_once_something_failed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    failed: list[int] = []
    asked: list[int] = []

    def has_failed() -> bool:
        asked.append(1)
        return bool(failed)

    try:
        assert child.pid not in stopped_children()
        os.kill(child.pid, signal.SIGSTOP)
        with ending_frozen_ranks(has_failed):
            wait_for(lambda: child.pid in stopped_children())
            before = len(asked)
            wait_for(lambda: len(asked) > before + 1)
            assert child.poll() is None, "it was looked for, and nothing has failed yet"
            failed.append(1)
            assert child.wait(PATIENCE_S) == -KILL
    finally:
        child.kill()
        child.wait()


def wait_for(event: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not event():
        assert time.monotonic() < until
        time.sleep(0.01)
