"""Copies between host and device on CPU: in order, as slow as the wire they stand for, and told."""

from __future__ import annotations

import threading

import pytest
import torch

from moeclipse.comm.async_ops import host_lane
from moeclipse.comm.async_ops.host_lane import HostLane
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST

CPU = torch.device("cpu")
PATIENCE_S = 600.0
"""Bounds a hang."""


def test_a_fetch_waits_for_the_store_of_what_was_in_the_buffer() -> None:
    lane = HostLane(CPU, Recorder(CPU), rate=1e5)
    buffer, first, second = (
        torch.full((2000,), 7, dtype=torch.uint8),
        *torch.zeros(2, 2000, dtype=torch.uint8),
    )
    second += 9
    left = lane.copy(TO_HOST, "store", first, buffer)
    came = lane.copy(TO_DEVICE, "fetch", buffer, second, after=left)
    came.get()
    assert first.unique().tolist() == [7]  # not what came later
    assert buffer.unique().tolist() == [9]
    lane.close()


class Wires:
    """A clock that each lane's thread has to itself: it moves where the thread sleeps."""

    def __init__(self) -> None:
        self.launched = threading.Event()
        self.both = threading.Barrier(2)
        self.slept: dict[str, list[float]] = {TO_DEVICE: [], TO_HOST: []}

    def perf_counter_ns(self) -> int:
        return round(1e9 * sum(self.slept[threading.current_thread().name]))

    def sleep(self, seconds: float) -> None:
        slept = self.slept[threading.current_thread().name]
        self.launched.wait(PATIENCE_S)
        if not slept:
            self.both.wait(PATIENCE_S)  # with the first copy of the other direction
        slept.append(seconds)


def test_both_directions_at_once_and_each_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    wires = Wires()
    monkeypatch.setattr(host_lane, "time", wires)
    recorder = Recorder(CPU)
    lane = HostLane(CPU, recorder, rate=5e4)
    recorder.begin_step()
    here, there = torch.zeros(2, 5000, dtype=torch.uint8)
    copies = [lane.copy(way, "x", there, here) for way in (TO_DEVICE, TO_HOST, TO_DEVICE)]
    assert not any(copy.ended.is_set() for copy in copies), "nobody waited"
    wires.launched.set()
    for copy in copies:
        copy.get()
    told = recorder.end_step()
    assert wires.slept == {TO_DEVICE: [0.1, 0.1], TO_HOST: [0.1]}
    assert told.lanes == [TO_DEVICE, TO_HOST, TO_DEVICE]
    # from its own beginning, not from when it was queued
    assert told.transfers == [("host", "x", 0.0, 0.1), ("host", "x", 0.0, 0.1), ("host", "x", 0.1, 0.2)]
    moments = [moment for wait in told.waits for moment in wait]
    assert len(moments) == 2 * 3
    assert moments == sorted(moments)
    lane.close()


def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for() -> None:
    lane = HostLane(CPU, Recorder(CPU))
    copy = lane.copy(TO_DEVICE, "x", torch.zeros(4), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        copy.get()
    assert lane.copy(TO_DEVICE, "y", torch.zeros(4), torch.ones(4)).get() is None  # the lane lives on
    before = threading.active_count()
    lane.close()
    assert threading.active_count() == before - 2
