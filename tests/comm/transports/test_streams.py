"""FIFOs that wait for words of other ranks: in order, by a thread, and as calls of a driver."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.comm.shared.signals import LINE
from moeclipse.comm.transports import streams
from moeclipse.comm.transports.streams import Driver, DriverStream, EventMark, ThreadStream
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TURNS = 50


def opened(mesh: Mesh) -> PeerMemory:
    return PeerMemory.open(mesh.experts, mesh.watch, num_bytes=64, num_words=2)


def ping_pong(mesh: Mesh) -> list[int]:
    """Rank 0 writes a number into its buffer and counts word 0; rank 1 takes it and counts word 1."""
    memory = opened(mesh)
    stream = ThreadStream("test", memory.signals, CPU)
    slot = memory.view(0, torch.int64, 0, 1)
    numbers, taken = torch.arange(TURNS), torch.zeros(TURNS, dtype=torch.int64)
    stream.begin()
    for turn in range(TURNS):
        if mesh.rank == 0:
            stream.wait(1, turn, 1, "its turn")
            stream.copy(slot, numbers[turn : turn + 1])
            stream.write(0, turn + 1)
        else:
            stream.wait(0, turn + 1, 0, "its turn")
            stream.copy(taken[turn : turn + 1], slot)
            stream.write(1, turn + 1)
    mark = stream.mark()
    mark.wait()
    assert mark.done()
    stream.close()
    mesh.barrier()
    return taken.tolist()


@pytest.mark.peer_memory
def test_a_thread_does_everything_in_order() -> None:
    assert run_ranks(2, ping_pong) == [[0] * TURNS, list(range(TURNS))]


def late(mesh: Mesh) -> str:
    memory = opened(mesh)
    if mesh.rank == 1:
        time.sleep(1.5)
        return ""
    stream = ThreadStream("test", memory.signals, CPU)
    target, first, second = torch.zeros(1), torch.ones(1), torch.full((1,), 7.0)  # whose memory it is told
    stream.copy(target, first)
    before = stream.mark()
    stream.wait(0, 1, 1, "rows of layer 3")
    stream.copy(target, second)
    behind = stream.mark()
    before.wait()
    with pytest.raises(CommError) as caught:
        behind.wait()
    assert behind.done(), "marks are reached, so that nobody waits for them for ever"
    assert target.item() == 1.0, "what stands behind a failure does not run"
    return str(caught.value)


@pytest.mark.peer_memory
def test_after_a_failure_nothing_runs_and_marks_tell_it() -> None:
    ok, text = run_ranks_raw(2, late, collective_deadline_s=0.5)[0]
    assert ok, text
    assert "rows of layer 3" in text
    assert "rank 1" in text


class NotedDriver:
    """The calls that a stream makes, with the addresses of words counted from 1000."""

    device = CUDA

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def wait(self, *given: int) -> None:
        self.calls.append(("wait", *given))

    def write(self, *given: int) -> None:
        self.calls.append(("write", *given))

    def copy(self, *given: int) -> None:
        self.calls.append(("copy", *given))


def test_a_driver_is_told_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, driver = FakeCuda(monkeypatch), NotedDriver()
    stream = DriverStream(driver, 1000)  # type: ignore[arg-type]
    to, source = torch.zeros(3), torch.ones(3)
    stream.begin()
    stream.wait(2, 5, 1, "rows")
    stream.copy(to, source)
    stream.write(3, 6)
    mark = stream.mark()
    stream.close()
    handle = stream.stream.cuda_stream
    assert driver.calls == [
        ("wait", handle, 1000 + 2 * LINE, 5),
        ("copy", handle, to.data_ptr(), source.data_ptr(), 12),
        ("write", handle, 1000 + 3 * LINE, 6),
    ]
    assert isinstance(mark, EventMark)
    mark.wait()
    assert cuda.take() == ["lane waits for current", "lane records event 1", "current waits for event 1"]
    assert mark.done()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of the driver's library."""
    made = SimpleNamespace(copy=None, wait=lambda *_: None, write=lambda *_: None)
    made.device_address = lambda address: address + 1
    monkeypatch.setattr(streams, "cuda_driver", lambda: made)
    return made


def test_memory_is_registered_or_the_reason_is_told(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def register(*given: int) -> int:
        asked.append(given)
        return 0 if given[1] < 1 << 20 else 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    driver = Driver(CUDA)
    assert driver.register(4096, 512) == 4097, "where the device sees it"
    assert asked == [(4096, 512, streams.PORTABLE_AND_MAPPED)]
    with pytest.raises(CommError, match="CUDA cannot register 3 MiB of shared memory: 2"):
        driver.register(4096, 3 << 20)


def test_a_driver_is_tried_before_it_is_relied_on(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, driver = FakeCuda(monkeypatch), Driver(CUDA)
    assert driver.probe(4096) is None
    monkeypatch.setattr(streams, "PROBE_S", 0.05)
    cuda.ready = False
    assert driver.probe(4096) == "a written word was not seen within 0.05 s"

    def refuse(*_: int) -> None:
        raise CommError("cuStreamWriteValue32 failed: not supported\nand more")

    driver.write = refuse
    assert driver.probe(4096) == "cuStreamWriteValue32 failed: not supported"
