"""A transfer that our own threads complete; to a lane it looks like one of torch.distributed's."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta


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
