"""Transfers: what they keep and how long, when they were done, and what a device orders behind what."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from torch.multiprocessing.reductions import StorageWeakRef

from moeclipse.comm.async_ops.lane import Lane, Transfer
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.watch.op_log import HEADER, OpLog
from moeclipse.core.errors import CommError


class Carrier:
    """A transfer that holds no tensor itself and is done when the test says so."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.patience: timedelta | None = None

    def get_future(self) -> Future[None]:
        return self.future

    def wait(self, patience: timedelta) -> None:
        self.patience = patience
        if not self.future.done():
            raise RuntimeError("timed out")


def launched(keep: Any = None, deadline_s: float = 7.0) -> tuple[Lane, Carrier, Transfer[str]]:
    mesh, carrier = Mesh.single(), Carrier()
    watch = replace(mesh.watch, deadline_s=deadline_s)
    lane = Lane("test", torch.device("cpu"), mesh.recorder, watch)
    lane.recorder.begin_step()
    return lane, carrier, lane.launch(mesh.experts, "rows", lambda: carrier, "what it brings", keep)


def test_what_travels_is_kept_until_it_is_waited_for_and_no_longer() -> None:
    rows = torch.ones(5)
    memory = StorageWeakRef(rows.untyped_storage())
    _, carrier, transfer = launched((rows,))
    del rows
    assert not memory.expired(), "the library reads this memory until the transfer is done"
    carrier.future.set_result(None)
    transfer.get()
    assert memory.expired(), "a transfer that somebody keeps must not keep the rows"


def test_what_the_host_launches_stands_in_the_file_with_its_times(tmp_path: Path) -> None:
    lane, carrier, _ = launched()
    lane.watch = replace(lane.watch, log=OpLog(tmp_path / "ops.txt"))
    transfer = lane.launch(Mesh.single().experts, "rows of layer 7", lambda: carrier, None)
    times = [line.split() for line in lines_of(lane)]
    assert [len(line) for line in times] == [3 + 5], "a number, launched and started; lane and label"
    carrier.future.set_result(None)
    transfer.get()
    (line,) = lines_of(lane)
    assert len(line.split()) == 4 + 5, "and the time at which it ended"
    assert line.endswith("test: rows of layer 7")
    assert [op.label for op in lane.watch.log.ops] == ["rows of layer 7"]


def lines_of(lane: Lane) -> list[str]:
    """Of ops in the file of its log."""
    lines = lane.watch.log._lines
    assert lines is not None
    return [line.rstrip() for line in lines[:].decode().splitlines()[HEADER:] if line.strip()]


def test_a_transfer_is_done_when_it_is_done_not_when_somebody_looks() -> None:
    """Else all that is waited for late would look as if it had been on the wire until then."""
    lane, carrier, transfer = launched()
    carrier.future.set_result(None)
    seen = time.perf_counter()
    transfer.get()
    ((_, label, begun, done),) = lane.recorder.end_step().transfers
    assert label == "rows"
    assert begun <= done <= seen


@pytest.mark.parametrize(("patience_s", "expected"), [(None, 7.0), (90.0, 90.0)])
def test_patience_replaces_the_deadline(patience_s: float | None, expected: float) -> None:
    _, carrier, transfer = launched()
    carrier.future.set_result(None)
    assert transfer.settle(patience_s) == "what it brings"
    assert carrier.patience == timedelta(seconds=expected)


def test_a_transfer_that_does_not_end_is_an_error_with_its_name() -> None:
    _, _, transfer = launched()
    with pytest.raises(CommError, match="rank 0 waited 7 s in rows"):
        transfer.get()


def test_a_transfer_that_cannot_start_is_an_error_with_its_name() -> None:
    mesh = Mesh.single()

    def start() -> None:
        raise RuntimeError("timed out before it began")

    with pytest.raises(CommError, match="rank 0 waited 60 s in rows"):
        mesh.a2a.launch(mesh.experts, "rows", start, None)


def test_where_a_library_tells_nobody_who_waits_stamps() -> None:
    """Gloo's sends and receives have no future."""

    class Silent:
        def get_future(self) -> None:
            raise RuntimeError("not supported")

        def wait(self, patience: timedelta) -> None:
            pass

    mesh = Mesh.single()
    mesh.recorder.begin_step()
    transfer = mesh.a2a.launch(mesh.experts, "rows", Silent, None)
    before = time.perf_counter()
    transfer.get()
    ((_, _, _, done),) = mesh.recorder.end_step().transfers
    assert done >= before


def on_a_device(cuda: FakeCuda, deadline_s: float = 7.0) -> tuple[Lane, Transfer[str]]:
    """A lane of a device, and a transfer on it whose Work is the library's."""

    class Library:
        def wait(self) -> None:
            cuda.say("waits for the library")

    def start() -> Library:
        cuda.say("holds the transfer")
        return Library()

    mesh = Mesh.single()
    watch = replace(mesh.watch, deadline_s=deadline_s)
    lane = Lane("a2a", torch.device("cuda"), Recorder(torch.device("cpu")), watch)
    return lane, lane.launch(mesh.experts, "rows", start, "what it brings", on_stream=True)


def test_on_a_device_streams_wait_and_the_host_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    lane, transfer = on_a_device(cuda)
    assert cuda.take() == [
        "lane waits for current",  # what it sends has been computed
        "lane holds the transfer",
        "lane waits for the library",
        "lane records event 1",
    ]
    cuda.ready = False
    assert [transfer.get(), transfer.get()] == ["what it brings"] * 2
    assert cuda.take() == ["current waits for event 1"], "once, and nobody polls"
    lane.launch(Mesh.single().experts, "on gloo", Carrier, None)
    assert cuda.take() == [], "what another library carries takes no stream"


def test_on_a_device_what_is_on_the_stream_already_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, mesh = FakeCuda(monkeypatch), Mesh.single()
    lane = Lane("a2a", torch.device("cuda"), Recorder(torch.device("cpu")), mesh.watch)
    lane.launch(mesh.experts, "rows", lambda: cuda.say("holds the transfer"), None, on_stream=True)
    assert cuda.take() == ["lane waits for current", "lane holds the transfer", "lane records event 1"]
    with pytest.raises(ZeroDivisionError):
        lane.launch(mesh.experts, "rows", lambda: 1 // 0, None, on_stream=True)
    cuda.take()
    cuda.say("computes")
    assert cuda.take() == ["current computes"], "a failed launch leaves nobody on its stream"


def test_on_a_device_the_host_waits_where_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    _, transfer = on_a_device(cuda)
    looked: list[bool] = []
    cuda.ready = False

    def settles(event: Any) -> bool:
        looked.append(True)
        return len(looked) > 30

    monkeypatch.setattr("fake_cuda.FakeEvent.query", settles)
    assert transfer.settle() == "what it brings"
    assert len(looked) == 31


def test_on_a_device_the_deadline_is_kept_where_the_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.ready = False
    _, transfer = on_a_device(cuda, deadline_s=0.01)
    begun = time.monotonic()
    with pytest.raises(CommError, match=r"rank 0 waited 0.01 s in rows"):
        transfer.settle()
    assert time.monotonic() - begun < 60
