"""Copies between host and device on CPU: in order, as slow as the wire they stand for, and told."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moeclipse.comm.async_ops.host_lane import HostLane
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST

CPU = torch.device("cpu")


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


def test_both_directions_at_once_and_each_at_its_rate() -> None:
    recorder = Recorder(CPU)
    lane = HostLane(CPU, recorder, rate=5e4)
    recorder.begin_step()
    begun = time.perf_counter()
    here, there = torch.zeros(2, 5000, dtype=torch.uint8)
    copies = [lane.copy(way, "x", there, here) for way in (TO_DEVICE, TO_HOST, TO_DEVICE)]
    assert time.perf_counter() - begun < 0.1  # nobody waited
    for copy in copies:
        copy.get()
    took = time.perf_counter() - begun
    assert 0.199 < took < 0.29  # two to the device, of 100 ms each, and one to the host beside them
    told = recorder.end_step()
    assert told.lanes == [TO_DEVICE, TO_HOST, TO_DEVICE]
    assert [group for group, *_ in told.transfers] == ["host"] * 3
    for _, _, launched, done in told.transfers:
        assert 0.099 < done - launched < 0.19  # from its own beginning, not from when it was queued
    assert sum(stop - start for start, stop in told.waits) == pytest.approx(took, abs=0.05)
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
