"""Two threads that look after a rank whose main thread may be stuck.

    with Watchdog(watch, end=leave):
        ...                          # ranks work together

The *looking* thread reads the op log and a clock, and nothing that can block: past the deadline of an op it
raises the alarm, and once a cause is known it gives the main thread a moment to leave by itself, then calls
`end`. The *talking* thread does what needs the store: it answers an alarm for a main thread that cannot,
judges, and hears what others found. If the store does not answer either, the looking thread ends the rank
with what it knows.

Without `end` (ranks on CPU, whose waits all have deadlines) nobody is ended; the threads only answer. A wait
that has more patience than the deadline, because of a disk, is ended by `lost` where a rank has gone
(`comm/watch/beats`).

Hazard: both are Python's, so a C call that never returns and holds the interpreter's lock stops them, too.
The others then say that this rank gives no sign, and as a last resort the interpreter's own fault handler,
which needs no lock, writes all stacks to `stacks` and ends the process.
"""

from __future__ import annotations

import faulthandler
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TextIO

from moeclipse.comm.failure import SIGN_S, Watch
from moeclipse.comm.watch.beats import Beats, describe_lost
from moeclipse.comm.watch.op_log import LoggedOp
from moeclipse.core.errors import CommError, DeadlineError

BEAT_S = 0.2
LEAVE_S = 1.5  # how long a main thread may take to leave by itself
SPARE_S = 1.0  # a host's own wait ends at the deadline: later than that it is stuck
LAST_RESORT = (2.0, 60.0)  # deadlines, or at least seconds, without the interpreter's lock


class Watchdog:
    def __init__(
        self,
        watch: Watch,
        *,
        end: Callable[[CommError], None] | None = None,
        lost: Callable[[CommError], None] | None = None,
        stacks: TextIO | None = None,
    ) -> None:
        """`end` must end the process; it is called on a thread of its own while the main thread is stuck.

        `lost` likewise, where it waits with patience for a rank that is gone.
        """
        self.watch, self._end, self._lost, self._stacks = watch, end, lost, stacks
        self._stopped = threading.Event()
        self._overdue: LoggedOp | None = None
        self._cause: CommError | None = None
        self._patient: LoggedOp | None = None
        self._gone: CommError | None = None
        """Why the patient wait has no end."""
        self._talked = time.monotonic()
        self._threads = [
            threading.Thread(target=run, name=f"moeclipse-{name}", daemon=True)
            for name, run in (("look", self._look), ("talk", self._talk))
        ]

    def __enter__(self) -> Watchdog:
        if self.watch.store is not None:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * SIGN_S)
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()

    # --- looking -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        log, deadline_s = self.watch.log, self.watch.deadline_s
        late_since = caused_since = 0.0
        while not self._stopped.wait(BEAT_S):
            self._arm()
            now = time.monotonic()
            log.look(now)
            late = log.overdue(now, deadline_s)
            if late is not None and late.on_host and late.overdue_s(now, deadline_s) < SPARE_S:
                late = None  # the host waits for it with a deadline of its own
            self._overdue = late
            self._patient = log.patient(deadline_s)
            self._look_for_lost(now)
            late_since = (late_since or now) if late is not None else 0.0
            if late is not None and self._cause is None and now - late_since > SIGN_S + 8 * BEAT_S:
                self._cause = DeadlineError(
                    f"rank {self.watch.rank} waited {deadline_s:g} s in {late.label}, and the store of the "
                    "run does not answer"
                )
            caused_since = (caused_since or now) if self._cause is not None else 0.0
            if self._cause is not None and self._end is not None and now - caused_since > LEAVE_S:
                self._end(self._cause)
                return

    def _look_for_lost(self, now: float) -> None:
        """The store, too, may be on a host that is gone."""
        op = self._patient
        if op is not None and op.waited is not None and self._lost is not None:
            since = max(self._talked, op.waited)
            if self._gone is None and now - since > self.watch.deadline_s:
                self._gone = DeadlineError(
                    f"rank {self.watch.rank} waited in {op.label}, and the store of the run does not answer"
                )
            if self._gone is not None:
                self._lost(self._gone)

    def _arm(self) -> None:
        if self._stacks is not None:
            deadlines, least_s = LAST_RESORT
            patience = max(deadlines * self.watch.deadline_s, least_s)
            faulthandler.dump_traceback_later(patience, exit=True, file=self._stacks)

    # --- talking -----------------------------------------------------------------------------------------

    def _talk(self) -> None:
        assert self.watch.store is not None
        # A connection of its own: the main thread may be waiting on the other one.
        watch = replace(self.watch, store=self.watch.store.clone())  # type: ignore[attr-defined]
        host, answered, beats = socket.gethostname(), False, Beats(watch)
        while not self._stopped.wait(BEAT_S):
            try:
                beats.sign(time.monotonic())
                op = self._patient
                lost = beats.lost(op, time.monotonic())
                if op is not None and lost and self._gone is None:
                    self._gone = watch.verdict(describe_lost(watch.rank, op, lost, watch.deadline_s))
                if not answered and watch.alarmed():
                    watch.sign(replace(watch.log.stand(time.monotonic()), host=host, address=watch.address))
                    answered = True
                if answered and self._cause is None:
                    cause = watch.first_cause()
                    self._cause = None if cause is None else cause.error()
            except RuntimeError:
                return  # the store is gone, and with it the run
            self._talked = time.monotonic()
            late = self._overdue
            if late is not None and self._cause is None:
                self._cause = watch.judge(late.label, late.ranks, lane=late.lane)
