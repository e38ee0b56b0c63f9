"""What a run writes down but can do without: metrics, traces, trackers. A bad disk costs them, not the run.

Idea. Such work is handed over as functions and done by one thread, in order. A disk that is slow lets it fall
behind; a disk that is full or gone makes it fail, which is told once for each kind of work, and once more
when it works again. Training waits for none of it, except for a moment at a checkpoint (`flush`).

Contract. `do` returns at once. What is queued is bounded: beyond MAX_QUEUED the newest work is left out and
counted. Until `begin`, and after `end`, work is done by the caller; failures are handled in the same way.

Hazard. Work runs later and on another thread: it must hold its own copy of what changes from step to step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

MAX_QUEUED = 1000
PATIENCE_S = 10.0  # for a slow disk, at a checkpoint and at the end of a run


class Scribe:
    def __init__(self) -> None:
        self._queue: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ending = self._busy = False
        self._failed: dict[str, int] = {}
        self._notes: list[str] = []

    def begin(self) -> None:
        """From here on a thread does the work."""
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="moeclipse-scribe", daemon=True)
        self._thread.start()

    def do(self, what: str, work: Callable[[], None]) -> None:
        """`what` names the kind of work in notes: "metrics", "load.npz"."""
        if self._thread is None:
            self._try(what, work)
            return
        with self._changed:
            if len(self._queue) < MAX_QUEUED:
                self._queue.append((what, work))
                self._changed.notify_all()
                return
        self._count_failure(what, "the disk is too slow")

    def take_notes(self) -> list[str]:
        """What is to be said since the last call."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def flush(self, patience_s: float = PATIENCE_S) -> bool:
        """Whether all work so far is done; waits for it, but not for ever."""
        until = time.monotonic() + patience_s
        with self._changed:
            while self._thread is not None and (self._queue or self._busy):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def end(self) -> None:
        """Do what is left, as far as patience goes; a thread that is stuck in a disk is left to itself."""
        self.flush()
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(1.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._ending:
                    self._changed.wait()
                if not self._queue or self._ending:
                    return
                what, work = self._queue.popleft()
                self._busy = True
            self._try(what, work)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _try(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a tracker may raise anything; none of it is worth the run
            why = (
                error.strerror if isinstance(error, OSError) and error.strerror else str(error) or repr(error)
            )
            self._count_failure(what, why.lower() if isinstance(error, OSError) else why)
            return
        with self._changed:
            missed = self._failed.pop(what, 0)
            if missed:
                self._notes.append(f"{what} can be written again; {missed} times it could not")

    def _count_failure(self, what: str, why: str) -> None:
        with self._changed:
            if what not in self._failed:
                self._notes.append(f"{what} cannot be written: {why}; training goes on without")
            self._failed[what] = self._failed.get(what, 0) + 1
