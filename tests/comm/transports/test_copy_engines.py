"""The exchange by slots and streams, on threads: uneven, in pieces, several at once, late and killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_files import left_over
from rank_signals import await_file

from moeclipse.comm.async_ops.lane import all_to_all
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports import copy_engines
from moeclipse.comm.transports.copy_engines import PinnedTransport, Slots, _short, pinned
from moeclipse.comm.transports.streams import DriverStream
from moeclipse.comm.transports.transport import TorchTransport, Transport
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

pytestmark = pytest.mark.peer_memory


def storm(mesh: Mesh, slot_bytes: int, slots: int, seed: int) -> int:
    """Random counts, several exchanges under way, got in any order, with stragglers; as torch does it."""
    P, lots, own = mesh.num_ranks, random.Random(seed), random.Random(100 * seed + mesh.rank)
    transport: Transport = pinned(mesh, mesh.experts, slot_bytes=slot_bytes, slots=slots)
    assert isinstance(transport, PinnedTransport)
    moved = 0
    for turn in range(20):
        results = []
        for k in range(lots.choice([1, 2, 4])):
            counts = [[lots.choice([0, 0, 1, 7, 300]) for _ in range(P)] for _ in range(P)]
            send, receive = counts[mesh.rank], [row[mesh.rank] for row in counts]
            dtype = lots.choice([torch.float32, torch.bfloat16, torch.float64, torch.int64])
            rows = torch.randint(-99, 99, (sum(send), lots.choice([1, 3]))).to(dtype)
            expected = all_to_all(mesh.a2a, mesh.experts, rows, send, receive, "gloo").get()
            if own.random() < 0.1:
                time.sleep(own.random() * 0.003)
            out = torch.empty_like(expected) if lots.random() < 0.5 else None
            got = transport.all_to_all(rows, send, receive, f"turn {turn}, exchange {k}", out)
            results.append((got, expected))
        own.shuffle(results)  # every rank in its own order
        for got, expected in results:
            assert torch.equal(got.get(), expected)
            assert got.get() is got.get()
            moved += len(expected)
    assert len(transport._under_way) <= 4, "what has arrived is forgotten"
    return moved


@pytest.mark.parametrize(
    ("num_ranks", "slot_bytes", "slots"), [(2, 64, 1), (2, 1 << 16, 4), (3, 100, 2), (4, 1000, 3)]
)
def test_it_equals_torch_whatever_fits_into_a_slot(num_ranks: int, slot_bytes: int, slots: int) -> None:
    assert min(run_ranks(num_ranks, storm, slot_bytes, slots, 1)) > 0


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_storms(num_ranks: int) -> None:
    for slots, slot_bytes in ((1, 64), (2, 1000), (3, 1 << 16), (4, 64)):
        run_ranks(num_ranks, storm, slot_bytes, slots, 10 * num_ranks + slots, deadline_s=300)


def one_pair(mesh: Mesh) -> list[float]:
    """A column of one element is contiguous whatever its stride, and so is what is made like it."""
    transport = pinned(mesh, mesh.experts)
    column = torch.full((4, 8), float(mesh.rank))[:, 3]
    found = []
    for sent in ([[0, 1], [1, 0]], [[1, 0], [0, 1]], [[0, 1], [0, 0]]):
        send, receive = sent[mesh.rank], [row[mesh.rank] for row in sent]
        rows, out = column[: sum(send)], torch.zeros(2, 8)[:, 3][: sum(receive)]
        found += transport.all_to_all(rows, send, receive, "one pair").get().tolist()
        found += transport.all_to_all(rows, send, receive, "one pair, given a place", out).get().tolist()
    return found


def test_one_element_travels_whatever_its_stride() -> None:
    assert run_ranks(2, one_pair) == [[1, 1, 0, 0], [0, 0, 1, 1, 0, 0]]


def beside(mesh: Mesh, arrived: Path) -> None:
    """Rows leave while this rank computes, those that need many slots, too."""
    P = mesh.num_ranks
    transport = pinned(mesh, mesh.experts, slot_bytes=1000)
    rows = torch.ones(2 * P, 10000)
    got = transport.all_to_all(rows, [2] * P, [2] * P, "test")
    if mesh.rank == 0:
        await_file(arrived)
    assert got.get().sum() == 20000 * P
    arrived.touch()
    mesh.barrier()


def test_a_rank_that_computes_does_not_hold_up_its_peers(tmp_path: Path) -> None:
    run_ranks(2, beside, tmp_path / "arrived")


def records(mesh: Mesh) -> tuple[list[str], bool]:
    transport = pinned(mesh, mesh.experts)
    mesh.recorder.begin_step()
    transport.all_to_all(torch.ones(4, 3), [2, 2], [2, 2], "dispatch, layer 0").get()
    stamps = mesh.recorder.end_step()
    group, label, launched, done = stamps.transfers[0]
    return [group, label], launched < done and len(stamps.waits) == 1


def test_transfers_are_recorded_as_any_other() -> None:
    assert run_ranks(2, records) == [(["experts", "dispatch, layer 0"], True)] * 2


def refused(mesh: Mesh) -> None:
    rows = torch.ones(4, 3)
    transport: Any = pinned(mesh, mesh.experts)
    assert transport is pinned(mesh, mesh.experts), "made once"
    with pytest.raises(ConfigError, match=r"send_counts \[1, 2\] add up to 3, but there are 4 rows"):
        transport.all_to_all(rows, [1, 2], [2, 2], "test")
    with pytest.raises(ConfigError, match=r"out is torch.float32 \(4, 3\), expected torch.float64 \(4, 3\)"):
        transport.all_to_all(rows.double(), [2, 2], [2, 2], "test", rows)
    with pytest.raises(ConfigError, match=r"slot_bytes \(-1\) and slots \(4\) must be at least 1"):
        pinned(mesh, mesh.experts, slot_bytes=-1)
    assert transport.all_to_all(rows, [2, 2], [2, 2], "test").get().tolist() == rows.tolist()
    transport.close()
    transport.close()
    with pytest.raises(CommError, match="it was closed; open a new one"):
        transport.all_to_all(rows, [2, 2], [2, 2], "test")


def test_mistakes_are_named() -> None:
    run_ranks(2, refused)


def test_one_rank_sends_nothing() -> None:
    mesh = Mesh.single()
    assert isinstance(pinned(mesh, mesh.experts), TorchTransport)


@pytest.mark.parametrize(
    ("value", "wanted", "short"),
    [
        (0, 0, False),
        (0, 1, True),
        (1, 1, False),
        (5, 1, False),
        (3, (1 << 32) + 2, False),
        (3, 1 << 32, False),
    ],
)
def test_counters_wrap(value: int, wanted: int, short: bool) -> None:
    assert _short(value, wanted) == short


def gone(mesh: Mesh, how: str) -> None:
    transport = pinned(mesh, mesh.experts, slot_bytes=1000)
    for turn in range(1000):
        if mesh.rank == 1 and turn == 20:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3)
            return
        rows = torch.ones(300, 10)
        transport.all_to_all(rows, [100] * 3, [100] * 3, f"turn {turn}").get()


@pytest.mark.parametrize(
    ("how", "deadline_s", "text"),
    [("killed", 300.0, "lost rank 1 in turn 20"), ("late", 1.0, "in turn 20: rank 1 did not arrive")],
)
def test_a_missing_peer_is_named(how: str, deadline_s: float, text: str) -> None:
    begun = time.monotonic()
    outcomes = run_ranks_raw(3, gone, how, collective_deadline_s=deadline_s)
    assert time.monotonic() - begun < 150
    ends = [outcomes[rank][1].strip().splitlines()[-1] for rank in (0, 2)]
    assert any(text in end for end in ends), ends
    assert all("rank 1" in end for end in ends), ends
    assert left_over() == []


class PolledStream(DriverStream):
    """As a driver's stream it cannot give up; it goes on whenever somebody asks whether it is done."""

    def __init__(self, signals: Any) -> None:
        self._signals, self._lock = signals, threading.Lock()
        self._work: deque[Callable[[], bool]] = deque()

    def begin(self) -> None:
        pass

    def wait(self, word: int, value: int, peer: int, label: str) -> None:
        self._work.append(lambda: not _short(self._signals.read(word), value))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._work.append(lambda: to.copy_(source) is to)

    def write(self, word: int, value: int) -> None:
        self._work.append(lambda: self._signals.post(word, value) is None)

    def mark(self) -> Any:
        return PolledMark(self)

    def left(self) -> int:
        with self._lock:
            while self._work and self._work[0]():
                self._work.popleft()
        return len(self._work)


class PolledMark:
    """All that a stream holds at one exchange: the tests below have one under way at a time."""

    def __init__(self, stream: PolledStream) -> None:
        self.stream = stream

    def done(self) -> bool:
        return self.stream.left() == 0

    def wait(self) -> None:
        while not self.done():
            time.sleep(1e-3)


def watched(mesh: Mesh, how: str) -> None:
    """Streams that wait for ever, with the thread that looks after them."""
    torch.cuda.set_device = lambda _: None
    PinnedTransport._streams = lambda self, wanted: (PolledStream(self._signals), PolledStream(self._signals))
    transport = PinnedTransport(mesh.a2a, mesh.experts, Slots.open(mesh, mesh.experts, "host", 1000, 2))
    assert transport.kind == "PolledStream"
    for turn in range(1000):
        if mesh.rank == 1 and turn == 20:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3)
            return
        rows = torch.full((30, 10), float(turn))
        found = transport.all_to_all(rows, [10] * 3, [10] * 3, f"turn {turn}").get()
        assert (found == turn).all()


@pytest.mark.parametrize(
    ("how", "deadline_s", "text"),
    [("killed", 300.0, "lost rank 1 in turn 20"), ("late", 1.0, "in turn 20: rank 1 did not arrive")],
)
def test_streams_that_cannot_give_up_are_let_go(how: str, deadline_s: float, text: str) -> None:
    outcomes = run_ranks_raw(3, watched, how, collective_deadline_s=deadline_s)
    ends = [outcomes[rank][1].strip().splitlines()[-1] for rank in (0, 2)]
    assert any(text in end for end in ends), ends
    assert all("rank 1" in end for end in ends), ends
    assert left_over() == []


def without_driver(mesh: Mesh) -> str:
    """A device whose driver cannot wait: threads do, and the reason is known."""

    def refuse(device: torch.device) -> None:
        raise CommError("no such call")

    transport: Any = pinned(mesh, mesh.experts)
    copy_engines.Driver = refuse  # type: ignore[assignment, misc]
    assert transport.kind == "ThreadStream"
    driver, words, problem = transport._try_driver(torch.device("cuda"))
    assert (driver, words) == (None, 0)
    return problem


def test_a_driver_that_refuses_is_no_failure() -> None:
    assert run_ranks(2, without_driver) == ["no such call"] * 2
