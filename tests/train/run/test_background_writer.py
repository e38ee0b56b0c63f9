"""What a run can do without is written by a thread, in order; a bad disk is told once and ends nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from apart import apart
from moeclipse.train.run import background_writer as scribe_module
from moeclipse.train.run.background_writer import Scribe


def full() -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_is_told_once_and_so_is_its_end() -> None:
    scribe, done = Scribe(), []
    for _ in range(3):
        scribe.do("metrics.jsonl", full)
    assert scribe.take_notes() == [
        "metrics.jsonl cannot be written: no space left on device; training goes on without"
    ]
    scribe.do("tensorboard", lambda: done.append(1))
    assert scribe.take_notes() == [], "another kind of work is no news"
    scribe.do("metrics.jsonl", lambda: done.append(2))
    scribe.do("metrics.jsonl", lambda: done.append(3))
    assert scribe.take_notes() == ["metrics.jsonl can be written again; 3 times it could not"]
    assert done == [1, 2, 3]


def test_a_tracker_may_raise_anything() -> None:
    scribe = Scribe()

    def broken() -> None:
        raise KeyError("scalar")

    scribe.do("tracker", broken)
    assert scribe.take_notes() == ["tracker cannot be written: 'scalar'; training goes on without"]


@apart
def test_a_thread_does_it_in_order() -> None:
    scribe, done = Scribe(), []
    scribe.begin()
    for number in range(100):
        scribe.do("numbers", lambda number=number: done.append((number, threading.current_thread().name)))
    assert scribe.flush()
    assert done == [(number, "moeclipse-scribe") for number in range(100)]
    scribe.end()
    scribe.do("numbers", lambda: done.append((100, threading.current_thread().name)))
    assert done[-1] == (100, "MainThread"), "after the end the caller does it"
    assert threading.active_count() == 1


def slow(gate: threading.Event) -> Callable[[], None]:
    return lambda: (gate.wait(), None)[1]


@apart
def test_a_disk_that_stands_still_costs_neither_time_nor_memory() -> None:
    scribe, gate = Scribe(), threading.Event()
    scribe_module.MAX_QUEUED = 5
    scribe.begin()
    for _ in range(50):  # the disk answers nobody: whoever waited for it would wait for ever
        scribe.do("metrics.jsonl", slow(gate))
    assert not scribe.flush(0.05), "it says that not all is written, and goes on"
    assert len(scribe._queue) in (4, 5), "the first may be in work"
    assert scribe.take_notes() == [
        "metrics.jsonl cannot be written: the disk is too slow; training goes on without"
    ]
    gate.set()
    assert scribe.flush()
    scribe.do("metrics.jsonl", lambda: None)
    scribe.end()
    assert any("can be written again" in note for note in scribe.take_notes())


@apart
def test_a_run_does_not_wait_for_ever_at_its_end() -> None:
    scribe, gate = Scribe(), threading.Event()
    scribe_module.PATIENCE_S = 0.1
    scribe.begin()
    scribe.do("metrics.jsonl", slow(gate))
    scribe.flush.__func__.__defaults__ = (0.1,)
    scribe.end()


def test_nothing_to_do_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = Scribe()
    assert scribe.flush()
    scribe.end()
    assert scribe.take_notes() == []
