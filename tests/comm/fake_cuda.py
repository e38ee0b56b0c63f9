"""Streams and events of a device that is not there: they write down what is ordered behind what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class FakeCuda:
    """In place of `torch.cuda`; `now` is the device's clock in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal: list[str] = []
        self.now, self.ready, self._events = 0.0, True, 0
        self._current = FakeStream(self, "current")
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: FakeStream(self, "lane"))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self._current)
        monkeypatch.setattr(torch.cuda, "set_stream", self._set)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.journal.append("host waits for all"))

    @contextmanager
    def _enter(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _set(self, stream: FakeStream) -> None:
        self._current = stream

    def say(self, text: str) -> None:
        self.journal.append(f"{self._current.name} {text}")

    def next_event(self) -> str:
        self._events += 1
        return f"event {self._events}"

    def take(self) -> list[str]:
        taken, self.journal = self.journal, []
        return taken


class FakeStream:
    cuda_stream = 4711

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.journal.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.journal.append(f"host waits for {self.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.journal.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.name, self.at = cuda, "", 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        self.name, self.at = self.cuda.next_event(), self.cuda.now
        where = stream or self.cuda._current
        self.cuda.journal.append(f"{where.name} records {self.name}")

    def query(self) -> bool:
        return self.cuda.ready

    def synchronize(self) -> None:
        self.cuda.journal.append(f"host waits for {self.name}")

    def elapsed_time(self, other: Any) -> float:
        return other.at - self.at
