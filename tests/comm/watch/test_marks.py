"""Marks that streams write to host memory; with a real device, through a stream that is held up."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.watch import op_log
from moeclipse.comm.watch.op_log import WORD, DeviceMarks


class Driver:
    """Writes at once, and writes down what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def device_address(self, host_address: int) -> int:
        return host_address + 4096

    def write(self, stream: int, address: int, value: int) -> None:
        self.asked.append((stream, address, value))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, full = Driver(), torch.full
    monkeypatch.setattr(op_log, "cuda_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "full", lambda *args, pin_memory, **ways: full(*args, **ways))
    return made


def test_a_mark_is_a_word_of_its_own(driver: Driver) -> None:
    words = DeviceMarks(4)
    words.write(7, 3, 12)
    ((stream, address, value),) = driver.asked
    assert (stream, value) == (7, 12)
    assert address == words._words.data_ptr() + 4096 + 3 * WORD
    assert words.read() == [-1] * 4
    words._words[3] = 12
    assert words.read() == [-1, -1, -1, words.value(12)]


def test_a_captured_graph_has_no_marks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    DeviceMarks(4).write(7, 3, 12)
    assert driver.asked == []


@pytest.mark.parametrize("number", [0, 5, 2**31 - 1, 2**31, 2**32 - 2, 2**32 + 3])
def test_values_are_compared_as_the_word_reads(number: int) -> None:
    word = torch.tensor([number & 0xFFFFFFFF], dtype=torch.int64).to(torch.int32)
    assert DeviceMarks.value(number) == int(word)
