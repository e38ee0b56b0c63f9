"""Ends ranks that are stopped (SIGSTOP, a debugger, a suspended job) once the others have failed of it.

Torch's agent asks ranks to end with SIGTERM, which a stopped process does not hear, and kills them half a
minute later. A rank that is stopped while nothing has failed is left alone: somebody may want to look at it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from moeclipse.cli.signals import children, state_of

LOOK_S = 0.3


@contextlib.contextmanager
def ending_frozen_ranks(has_failed: Callable[[], bool]) -> Iterator[None]:
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK_S):
            if has_failed():
                for pid in stopped_children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=look, name="moeclipse-frozen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def stopped_children() -> list[int]:
    return [pid for pid in children() if state_of(pid) == "T"]
