"""What two ranks answer, and what is said when they do not."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from moeclipse.cli.two_ranks import Answer, Task, ask_two_ranks


def meet(rank: int, folder: str) -> Answer:
    Path(folder, str(rank)).touch()
    until = time.monotonic() + 300
    while not Path(folder, str(1 - rank)).exists():
        assert time.monotonic() < until
    return True, f"rank {rank} met the other"


def fail(rank: int, folder: str) -> Answer:
    raise RuntimeError("no interface eth9\nmore")


def leave(rank: int, folder: str) -> Answer:
    os._exit(3)


def sleep(rank: int, folder: str) -> Answer:
    time.sleep(60)
    return True, ""


@pytest.mark.parametrize(
    ("task", "timeout_s", "answer"),
    [
        (meet, 20.0, (True, "rank 0 met the other")),
        (fail, 20.0, (False, "no interface eth9")),
        (leave, 20.0, (False, "a rank ended early")),
        (sleep, 0.2, (False, "no answer in 0.2 s")),
    ],
)
def test_answers(task: Task, timeout_s: float, answer: Answer) -> None:
    assert ask_two_ranks(task, timeout_s) == answer
    assert not multiprocessing.active_children(), "ranks that never answer are ended"


def test_no_ranks_behind_threads_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeclipse.core.forking.library_threads", lambda: ["python"])
    yes, text = ask_two_ranks(meet, 20.0)
    assert not yes
    assert text.startswith("a library has started a thread in this process (python)")
