"""Asked to leave: SIGTERM, SIGUSR1 and Ctrl-C end a run after its next step, with a checkpoint.

    rank        hears a signal, tells the others with the numbers of its step; all save that step and leave
    launcher    hears a signal, passes it on to its ranks, and waits for them
    a second    signal, more than ONE_REQUEST_S after the first, ends at once
    an agent    that lost a rank ends the others with SIGTERM: nothing can be saved then, they end at once

Whoever schedules jobs signals all processes at once, the launcher and its ranks, and a terminal does so with
Ctrl-C: what arrives within a moment is one request.

Hazard. A rank that is blocked inside a collective does not run Python's signal handlers. Every rank therefore
keeps a thread that hears signals through a pipe: it ends the process at the second signal, when nothing is
trained yet, or when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ONE_REQUEST_S = 1.0
PATIENCE_S = 3.0  # how long a rank may take to leave when it trains nothing
WAKE = 0


class Leaving:
    """A rank's ear, as a context: `asked` is the signal's name once one has come."""

    def __init__(self, launcher: int = 0, ranks: int = 0) -> None:
        """`launcher`: its process, which has started so many `ranks`."""
        self.launcher, self.ranks = launcher, ranks
        self.asked = ""
        self.status = 128 + signal.SIGINT
        """Of a rank that a signal interrupts before it trains."""
        self._since = 0.0
        self._trains = self._done = False
        self._before: dict[int, object] = {}

    def listen(self) -> str:
        """For the trainer, at every step: from the first call on, a signal waits for the end of a step."""
        self._trains = True
        return self.asked

    def __enter__(self) -> Leaving:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._hear, name="moeclipse-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._main:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._done = True
        os.write(self._writer, bytes([WAKE]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self._trains:
            self.status = 128 + number
            raise KeyboardInterrupt

    def _hear(self) -> None:
        """On the thread: what came through the pipe, and whether the launcher still lives."""
        while not self._done:
            ready, _, _ = select.select([self._reader], [], [], 1.0)
            number = os.read(self._reader, 1)[0] if ready else WAKE
            if number in SIGNALS:
                self._take(number)
            elif self.launcher and os.getppid() != self.launcher:
                self._end_soon(signal.SIGINT)

    def _take(self, number: int) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._since = signal.Signals(number).name, now
            if number == signal.SIGTERM and self.launcher and len(children(self.launcher)) < self.ranks:
                os._exit(128 + number)
            if not self._trains:
                self._end_soon(number)
        elif now - self._since > ONE_REQUEST_S:
            os._exit(128 + number)

    def _end_soon(self, number: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and not self._done:
            time.sleep(0.05)
        if not self._done:
            os._exit(128 + number)


@contextlib.contextmanager
def passing_on(end: Callable[[int], None]) -> Iterator[Callable[[], int]]:
    """In the launcher: the first signal goes to all ranks, which then leave; a second one calls `end`.

    Gives a function that says which signal came, or 0.
    """
    since, asked = 0.0, 0
    if threading.current_thread() is not threading.main_thread():
        yield lambda: asked
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal since, asked
        now = time.monotonic()
        if not asked:
            since, asked = now, number
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)  # which also ends a rank that does not listen yet
        elif now - since > ONE_REQUEST_S:
            end(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def children(of: int | str = "self") -> list[int]:
    """Processes that this one started, or another; those that have ended do not count."""
    found = []
    for listing in Path(f"/proc/{of}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in listing.read_text().split()]
    return [pid for pid in found if state_of(pid) not in ("Z", "X", "")]


def state_of(pid: int) -> str:
    """The kernel's letter: T is stopped, Z has ended; nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
