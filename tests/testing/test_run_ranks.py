"""The harness itself: results, failures, kills, and a deadline that shows where everybody was."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.testing import run_ranks as harness
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(3, lambda mesh, base: {"value": torch.full((2,), mesh.rank + base)}, 10)
    assert [result["value"].tolist() for result in results] == [[10, 10], [11, 11], [12, 12]]


def read_mark(mesh: Mesh) -> tuple[int, str, bool]:
    return mesh.rank, os.environ["MARK"], "pytest" in sys.modules


def mark(rank: int) -> None:
    os.environ["MARK"] = f"rank {rank}"


@pytest.mark.parametrize("parent_uses_cuda", [False, True])
def test_something_runs_before_a_rank_meets_the_others(
    monkeypatch: pytest.MonkeyPatch, parent_uses_cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: parent_uses_cuda)
    found = run_ranks(2, read_mark, before=mark)
    assert [(rank, text) for rank, text, _ in found] == [(0, "rank 0"), (1, "rank 1")]
    forked = [inherited for _, _, inherited in found]
    assert parent_uses_cuda or all(forked), "ranks are forked where that is possible"
    assert "MARK" not in os.environ


def connect_late(rank: int) -> None:
    original = Mesh.__init__

    def late(mesh: Mesh, **how: object) -> None:
        original(mesh, **how)  # type: ignore[arg-type]
        time.sleep(0.3 * rank)
        os.environ["CONNECTED"] = str(time.monotonic())

    Mesh.__init__ = late  # type: ignore[method-assign, assignment]


def test_nobody_begins_or_leaves_while_others_connect() -> None:
    found = run_ranks(2, lambda mesh: (time.monotonic(), float(os.environ["CONNECTED"])), before=connect_late)
    assert min(begun for begun, _ in found) >= max(connected for _, connected in found)


def wait_in_vain(mesh: Mesh) -> None:
    if mesh.rank == 1:
        time.sleep(60)
    mesh.barrier()


def test_the_deadline_prints_every_rank_s_stack() -> None:
    with pytest.raises(AssertionError, match="did not finish within 3 s") as caught:
        run_ranks(2, wait_in_vain, deadline_s=3)
    report = str(caught.value)
    assert "--- rank 0" in report
    assert "--- rank 1" in report
    assert report.count("in wait_in_vain") == 2
    assert "pytest" not in report, "what called a rank is nobody's question"


def never_come(rank: int) -> None:
    if rank == 1:
        raise OSError("no device for me")


def test_nobody_waits_for_a_rank_that_failed_before_it_met_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "START_S", 30.0)
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, wait_in_vain, deadline_s=600, before=never_come)
    report = str(caught.value)
    assert report.startswith("rank 1:\n"), "who failed by itself speaks first"
    assert "OSError: no device for me" in report
    assert "rank 0: CommError: rank 1 failed before it met the others" in report


def fail_or_wait(mesh: Mesh) -> None:
    if mesh.rank == 1:
        raise ValueError("of rank 1 alone")
    time.sleep(60)


def test_behind_a_deadline_those_that_failed_speak_first() -> None:
    with pytest.raises(AssertionError, match="did not finish within 3 s") as caught:
        run_ranks(2, fail_or_wait, deadline_s=3)
    report = str(caught.value)
    assert 0 < report.find("ValueError: of rank 1 alone") < report.index("--- rank 0")
    assert "in fail_or_wait" in report.partition("--- rank 0")[2], "where the other one stands"


def compute(mesh: Mesh, seconds: float = 1.5) -> int:
    until, turns = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        turns += 1
    return mesh.rank


def compute_among_others(_: Mesh, seconds: float) -> int:
    """On a core that twenty others want."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rank, others = os.getpid(), []
    for _number in range(20):
        others.append(os.fork())
        if others[-1] == 0:
            while os.getppid() == rank:  # also where it is ended
                pass
            os._exit(0)
    try:
        while time.process_time() < seconds:
            pass
    finally:
        for other in others:
            os.kill(other, signal.SIGKILL)
    return len(others)


def test_ranks_that_wait_for_a_core_do_not_stand_still() -> None:
    assert run_ranks(1, compute_among_others, 0.1, deadline_s=1.0) == [20]


def test_ranks_that_compute_take_longer_than_a_deadline() -> None:
    assert run_ranks(2, compute, deadline_s=0.6) == [0, 1]


def test_ranks_that_compute_without_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeclipse.testing.run_ranks.BUSY", 1)
    with pytest.raises(AssertionError, match=r"did not finish within 0.6 s[\s\S]*in compute"):
        run_ranks(1, compute, 60.0, deadline_s=0.6)


@pytest.mark.parametrize("computes", [False, True])
def test_time_in_which_all_were_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    """A job that is suspended, a machine that sleeps: whoever comes first then would end ranks that go on."""
    clock, spent = [100.0], [0.0]
    monkeypatch.setattr(harness.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(harness, "_busy_seconds", lambda pid: spent[0])

    def is_over_in(patience: harness._Patience, seconds: float) -> bool:
        clock[0] += seconds
        spent[0] += seconds * computes
        return patience.is_over()

    rank: Any = SimpleNamespace(pid=1)
    patience = harness._Patience([(rank, rank)], 10.0)
    assert not any(is_over_in(patience, 3600.0) for _ in range(3))
    looks = 2 * (harness.BUSY * 10 if computes else 10) - 3 * 4
    assert not any(is_over_in(patience, harness.LOOK_S) for _ in range(looks - 1))
    assert is_over_in(patience, harness.LOOK_S)


def test_a_failing_rank_fails_the_test_with_its_traceback() -> None:
    def fail(mesh: Mesh) -> None:
        mesh.barrier()  # who is still connecting has another tale to tell
        if mesh.rank == 1:
            raise ValueError("no such luck")

        mesh.barrier()

    with pytest.raises(
        AssertionError, match=r"\Arank 1:\nTraceback[\s\S]*ValueError: no such luck"
    ) as caught:
        run_ranks(2, fail)
    report = str(caught.value)
    assert "_child" not in report
    assert report.splitlines()[-1].endswith("CommError: rank 1 failed: ValueError: no such luck")
    assert report.count("Traceback") == 1, "of ranks that were told of it, a line"


def test_a_killed_rank_is_reported(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def die(mesh: Mesh) -> None:
        if mesh.rank == 0:
            ready.touch()
            return
        while not ready.exists():  # rank 0 may still be connecting, and would fail
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    outcomes = run_ranks_raw(2, die)
    assert outcomes[0][0]
    assert outcomes[1] == (False, "rank 1 ended with exit code -9 and no result")
