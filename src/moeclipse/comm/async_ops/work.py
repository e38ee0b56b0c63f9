"""What a lane's `start` returns, where our own code does what a library does otherwise.

`torch.distributed` calls an asynchronous collective a Work: it can be waited for with a deadline, and has a
future that whoever completes it sets. These are Works that our threads complete, and one that is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol


class Waitable(Protocol):
    """What a lane asks of a Work, torch's or ours."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...

    def get_future(self) -> Completion: ...


class Completion(Protocol):
    def add_done_callback(self, call: Callable[[object], None], /) -> object: ...


class OwnWork:
    """Whoever completes `future` ends the transfer, with a result or with what it failed with."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def get_future(self) -> Future[None]:
        return self.future

    def wait(self, patience: timedelta | None = None) -> None:
        try:
            self.future.result(None if patience is None else patience.total_seconds())
        except TimeoutError:
            raise RuntimeError("timed out") from None


class CompletedWork:
    """Whoever started it has waited for it already."""

    def wait(self, *_: object) -> None:
        return

    def get_future(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future
