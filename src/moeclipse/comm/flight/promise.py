"""Transfers that our own code completes; to a lane they look like those of torch.distributed."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any


class Promise:
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


class Done:
    """A transfer that whoever started it has waited for already."""

    def wait(self, *_: Any) -> None:
        return

    def get_future(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future
