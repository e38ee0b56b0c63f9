"""Seconds of all ranks: medians, the slowest of them, and the same numbers everywhere."""

from __future__ import annotations

import time

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.stopwatch import REPEATS, clock, slowest, tell
from moeclipse.testing.run_ranks import run_ranks


def test_a_clock_tells_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = [9.0, 1.0, 3.0, 2.0, 7.0], [0.0]
    assert len(took) == REPEATS
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += took.pop(0)

    assert clock(work, torch.device("cpu")) == 3.0
    assert not took


def together(mesh: Mesh) -> tuple[list[float], list[list[float]], list[int]]:
    runs = [0, 0]

    def work(number: int) -> None:
        runs[number] += 1
        time.sleep(0.02 if (mesh.rank, number) in ((0, 0), (1, 1)) else 0.0)

    seconds = slowest([lambda: work(0), lambda: work(1)], mesh)
    return seconds, tell(mesh, [float(mesh.rank), 5.0]), runs


def test_the_slowest_rank_counts_for_each_work() -> None:
    one, other = run_ranks(2, together)
    assert one == other
    assert min(one[0]) >= 0.02
    assert one[1] == [[0.0, 5.0], [1.0, 5.0]]
    assert one[2] == [1 + REPEATS] * 2, "the first of all is a trial"
