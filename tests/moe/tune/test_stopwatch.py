"""Seconds of all ranks: medians, the slowest of them, and the same numbers everywhere."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.tune.stopwatch import REPEATS, Stopwatch, Timing, clock, slope_of, slowest, tell, timing_of
from moeclipse.testing.run_ranks import run_ranks


def test_a_clock_tells_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    took, now = [9.0, 1.0, 3.0, 2.0, 7.0], [0.0]
    assert len(took) == REPEATS
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += took.pop(0)

    assert clock(work, torch.device("cpu")) == 3.0
    assert not took


def together(mesh: Mesh) -> tuple[list[Any], list[list[float]], list[int]]:
    runs = [0, 0]

    def work(number: int) -> None:
        runs[number] += 1
        time.sleep(0.02 if (mesh.rank, number) in ((0, 0), (1, 1)) else 0.0)

    seconds = slowest([lambda: work(0), lambda: work(1)], mesh)
    return [tuple(one) for one in seconds], tell(mesh, [float(mesh.rank), 5.0]), runs


def test_the_slowest_rank_counts_for_each_work() -> None:
    one, other = run_ranks(2, together)
    assert one == other
    assert min(seconds for seconds, _ in one[0]) >= 0.02
    assert one[1] == [[0.0, 5.0], [1.0, 5.0]]
    assert one[2] == [1 + REPEATS] * 2, "the first of all is a trial"


def test_a_slope_is_known_where_it_is_larger_than_chance() -> None:
    few, many = timing_of([1.0, 1.1, 1.05, 1.0, 0.9]), timing_of([3.0, 3.1, 2.9, 3.0, 5.0])
    assert few.seconds == 1.0
    assert few.noise > 0, "calls scatter"
    each, doubt = slope_of(few, many, 100.0)
    assert each == pytest.approx(0.02)
    assert 0 < doubt < 0.1
    assert slope_of(few, many, 100.0).rate == pytest.approx(50.0)
    for flat in ([1.0] * 5, [1.01, 1.2, 0.9, 1.0, 1.3], [0.5] * 5):
        assert slope_of(few, timing_of(flat), 100.0) == (None, 1.0), flat
    assert slope_of(Timing(1.0, 0.0), Timing(1.0, 0.0), 1.0).rate is None, "no noise, and no slope"


def test_a_stopwatch_tells_the_median_and_the_best() -> None:
    watch = Stopwatch(cuda=False)
    assert watch.seconds() is None
    assert watch.best("F") is None
    watch._laps["F"] = [(0.0, 1.0), (0.0, 4.0), (0.0, 3.0), (0.0, 2.0), (0.0, 9.0)]
    assert watch.seconds("F") == pytest.approx(3.0)
    assert watch.best("F") == pytest.approx(2.0), "the first lap does not count"
    assert watch.scatter() == 0.0, "nothing is known of backward"
    watch._laps["B"] = [(0.0, 9.0), (0.0, 6.0), (0.0, 7.0)]
    assert watch.scatter() == pytest.approx((3.5 + 6.5) / (2.0 + 6.0) - 1)
    watch._laps["B"] = []
    for _ in range(20):
        watch.lap(watch.stamp(), "B")
    assert len(watch._laps["B"]) == Stopwatch.LAPS
