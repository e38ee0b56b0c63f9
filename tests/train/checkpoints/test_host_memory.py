"""Memory of a copy: bytes arrive across slices, whatever was pinned, and pins are let go."""

from __future__ import annotations

import threading

import pytest
import torch

from moeclipse.train.checkpoints.host_memory import HostMemory

SLICE = 1 << 16


class NotedPins:
    """Pins nothing, and remembers what it was asked for; `room` slices are all it has."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.held, self.lengths = room, set[int](), list[int]()
        self.go = threading.Event()
        self.go.set()

    def pin(self, address: int, num_bytes: int) -> bool:
        self.go.wait()
        if len(self.held) == self.room:
            return False
        self.held.add(address)
        self.lengths.append(num_bytes)
        return True

    def unpin(self, address: int) -> None:
        self.held.remove(address)


@pytest.mark.parametrize("room", [0, 1, 2, 99])
def test_bytes_arrive_across_slices(room: int) -> None:
    pins = NotedPins(room)
    memory = HostMemory(3 * SLICE + 28, pins, SLICE)
    a, b = torch.randn(24_577, dtype=torch.float64), torch.arange(5, dtype=torch.int32)
    assert a.nbytes > 3 * SLICE
    for _ in range(2):
        memory.copy(0, a)
        memory.copy(a.nbytes, b)
        assert torch.equal(memory.data[: a.nbytes].view(torch.float64), a)
        assert torch.equal(memory.data[a.nbytes : a.nbytes + b.nbytes].view(torch.int32), b)
        a, b = a.roll(7), b.roll(1)
    assert pins.lengths == [SLICE, SLICE, SLICE, 28][: len(pins.lengths)]
    assert len(pins.held) == min(room, 4)
    memory.close()
    assert not pins.held


def test_no_copy_crosses_two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, lengths = HostMemory(3 * SLICE, NotedPins(), SLICE), list[tuple[int, int]]()
    plain, first = torch.Tensor.copy_, memory.data.data_ptr()

    def noted(place: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        lengths.append((place.data_ptr() - first, place.numel()))
        return plain(place, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    memory.copy(SLICE - 8, torch.zeros(SLICE // 8 + 2, dtype=torch.float64))
    assert lengths == [(SLICE - 8, 8), (SLICE, SLICE), (2 * SLICE, 8)]
    monkeypatch.undo()
    memory.close()


def test_a_copy_waits_until_memory_is_ready() -> None:
    pins = NotedPins()
    pins.go.clear()
    memory = HostMemory(SLICE, pins, SLICE)
    assert not memory.ready
    other = threading.Thread(target=lambda: memory.copy(0, torch.ones(4)))
    other.start()
    other.join(0.2)
    assert other.is_alive()
    pins.go.set()
    other.join(10)
    assert memory.ready
    assert float(memory.data[:16].view(torch.float32).sum()) == 4
    memory.close()


def test_closing_stops_what_is_under_way() -> None:
    pins = NotedPins()
    pins.go.clear()
    memory = HostMemory(100 * SLICE, pins, SLICE)
    closing = threading.Thread(target=memory.close)
    closing.start()
    pins.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not pins.held
    assert len(pins.lengths) < 100


def test_nothing_and_one_byte() -> None:
    for num_bytes in (0, 1):
        memory = HostMemory(num_bytes, NotedPins(), SLICE)
        memory.copy(0, torch.ones(num_bytes, dtype=torch.uint8))
        memory.close()
    assert HostMemory(8).ready, "on CPU pages come with the copy"
