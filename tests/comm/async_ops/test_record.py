"""Stamps of one step: what computes, waits and travels when, on the clock of the host or of a device."""

from __future__ import annotations

import time

import pytest
import torch
from fake_cuda import FakeCuda

from moeclipse.comm.async_ops.record import Recorder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_outside_a_step_nothing_is_kept() -> None:
    recorder = Recorder(CPU)
    with recorder.compute(), recorder.waiting():
        recorder.launch("a2a", "experts", "before").done = 1
    recorder.begin_step()
    stamps = recorder.end_step()
    assert (stamps.compute, stamps.waits, stamps.transfers) == ([], [], [])
    assert not recorder.active


def test_a_step_holds_what_began_in_it_in_order() -> None:
    recorder = Recorder(CPU)
    recorder.begin_step()
    began = time.perf_counter()
    with recorder.compute():
        first = recorder.launch("a2a", "experts", "rows")
        second = recorder.launch("dp", "dp", "gradients")
    with recorder.waiting():
        second.done = time.perf_counter_ns()
    stamps = recorder.end_step()
    ended = time.perf_counter()
    begin, end = stamps.window
    ((compute_from, compute_to),), ((wait_from, wait_to),) = stamps.compute, stamps.waits
    (_, rows_from, rows_to), (_, grads_from, grads_to) = (entry[1:] for entry in stamps.transfers)
    assert [entry[:2] for entry in stamps.transfers] == [("experts", "rows"), ("dp", "gradients")]
    order = [begin, compute_from, rows_from, grads_from, compute_to, wait_from, grads_to, wait_to, end]
    assert order == sorted(order)
    assert rows_to == end, "what nobody saw arrive was under way to the end"
    assert first.done is None
    assert begin <= began <= ended, "in seconds of one clock"


def test_a_step_begins_anew() -> None:
    recorder = Recorder(CPU)
    for label in ("first", "second"):
        recorder.begin_step()
        with recorder.compute():
            recorder.launch("a2a", "experts", label)
        stamps = recorder.end_step()
    assert [entry[1] for entry in stamps.transfers] == ["second"]
    assert len(stamps.compute) == 1


def test_what_begins_before_a_step_and_ends_in_it_is_not_of_it() -> None:
    recorder = Recorder(CPU)
    with recorder.compute():
        recorder.begin_step()
    assert recorder.end_step().compute == []


def test_events_of_a_device_become_seconds_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, recorder = FakeCuda(monkeypatch), Recorder(CUDA)
    cuda.now = 1000.0
    recorder.begin_step()
    cuda.now = 1250.0
    with recorder.compute():
        stamps = recorder.launch("a2a", "experts", "rows")
        cuda.now = 1500.0
    stamps.done = recorder.stamp()
    cuda.now = 2000.0
    told = recorder.end_step()
    begin = told.window[0]
    assert told.window[1] - begin == pytest.approx(1.0)
    ((first, last),) = told.compute
    assert (first - begin, last - begin) == (pytest.approx(0.25), pytest.approx(0.5))
    ((_, _, launched, done),) = told.transfers
    assert (launched - begin, done - begin) == (pytest.approx(0.25), pytest.approx(0.5))
    assert cuda.journal.count("host waits for all") == 2, "at both ends of a step, never between"
    stamps.done = time.perf_counter_ns()
    assert recorder.seconds(stamps.done) == pytest.approx(stamps.done * 1e-9), "threads stamp by the host"


def test_what_outlives_its_step_is_of_both() -> None:
    recorder = Recorder(CPU)
    recorder.begin_step()
    store = recorder.launch("host:store", "host", "store", outlives=True)
    recorder.launch("a2a", "experts", "nobody waits")
    first = recorder.end_step()
    assert [done for _, _, _, done in first.transfers] == [first.window[1]] * 2
    assert first.carried == []
    recorder.begin_step()
    store.done = time.perf_counter_ns()
    second = recorder.end_step()
    assert second.transfers == []
    ((label, begun, done),) = second.carried
    assert (label, begun, done) == ("store", second.window[0], recorder.seconds(store.done))
    recorder.begin_step()
    assert recorder.end_step().carried == []


def test_the_host_waits_for_compute_alone_while_a_copy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, recorder = FakeCuda(monkeypatch), Recorder(CUDA)
    recorder.begin_step()
    store = recorder.launch("host:store", "host", "store", outlives=True)
    rows = recorder.launch("a2a", "experts", "rows")
    rows.done, store.done = recorder.stamp(), recorder.stamp()
    cuda.ready = False
    cuda.take()
    stamps = recorder.end_step()
    assert cuda.take()[1:] == ["host waits for current", f"host waits for {rows.done.name}"]
    assert [(begun, done) for *_, begun, done in stamps.transfers] == [(stamps.window[1],) * 2] * 2
    recorder.begin_step()
    assert cuda.take()[0] == "host waits for current"
    cuda.ready = True
    recorder.end_step()
    assert "host waits for all" in cuda.take(), "it has ended: nothing goes on"


def test_names_are_kept_while_a_step_is_traced_and_cost_nothing_otherwise() -> None:
    recorder = Recorder(CPU)
    recorder.begin_step()
    with recorder.mark("not traced"), recorder.compute("whole"):
        pass
    assert recorder.end_step().named == []
    recorder.marks = []
    recorder.begin_step()
    with recorder.compute("whole"):
        with recorder.mark(7):
            recorder.launch("a2a", "experts", "rows")
        with recorder.region(), recorder.mark("captured"):
            pass
    stamps = recorder.end_step()
    assert [name for name, _, _ in stamps.named] == ["whole", "7"], "the whole before its parts"
    (_, a, b), (_, c, d) = stamps.named
    assert a <= c <= d <= b
    assert stamps.lanes == ["a2a"]
    assert stamps.compute == [(a, b)]
