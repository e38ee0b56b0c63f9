"""A lane: a FIFO of communication that runs beside compute.

    ticket = lane.launch(group, "dispatch rows, layer 3", lambda: dist.all_to_all_single(..., async_op=True))
    ...                  # compute that does not need the result
    ticket.wait()        # from here on the result may be used

On CUDA a lane is a stream: the transfer starts after everything the current stream holds at launch,
and `wait` orders the current stream behind it without blocking the host. On CPU the transfer runs on
gloo's own threads and `wait` blocks. Order comes from events alone, never from a driver setting.

A ticket keeps its tensors alive until it is waited for; every ticket must be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from moeclipse.comm.failure import Watch
from moeclipse.comm.flight.record import Move, Recorder
from moeclipse.comm.group import Group

SPIN_S = 2e-3  # how long the host spins for a result before it lets others have the core


class Ticket:
    """A transfer under way."""

    def __init__(self, lane: Lane, group: Group, label: str, move: Move, tensors: Any) -> None:
        self._lane, self._group, self._label, self._move = lane, group, label, move
        self._tensors = tensors
        self._work: Any = None
        self._event: torch.cuda.Event | None = None
        self._waited = False

    def wait(self, patience_s: float | None = None) -> None:
        """Let what follows use the result. `patience_s` replaces the deadline where peers may be slow."""
        if self._waited:
            return
        self._waited = True
        recorder = self._lane.recorder
        with recorder.waiting():
            if self._event is not None:
                torch.cuda.current_stream().wait_event(self._event)
            else:
                self._block(patience_s)
        if self._move.done is None:
            self._move.done = time.perf_counter_ns()
        self._tensors = None

    def settle(self, patience_s: float | None = None) -> None:
        """Wait on the host until the result is there, no longer than the deadline."""
        self.wait(patience_s)
        if self._event is None:
            return
        begun = time.monotonic()
        watch = self._lane.watch
        while not self._event.query():
            waited = time.monotonic() - begun
            if waited > (patience_s or watch.deadline_s):
                raise watch.explain(self._label, self._group.ranks, TimeoutError("timed out"))
            if waited > SPIN_S:
                time.sleep(SPIN_S / 10)

    def _block(self, patience_s: float | None) -> None:
        watch = self._lane.watch
        try:
            self._work.wait(timedelta(seconds=patience_s or watch.deadline_s))
        except RuntimeError as error:
            raise watch.explain(self._label, self._group.ranks, error) from None


class Lane:
    def __init__(self, name: str, device: torch.device, recorder: Recorder, watch: Watch) -> None:
        self.name, self.recorder, self.watch = name, recorder, watch
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def launch(
        self,
        group: Group,
        label: str,
        start: Callable[[], Any],
        tensors: Any = None,
        *,
        on_stream: bool = False,
    ) -> Ticket:
        """Start a transfer; `start` returns the Work of an asynchronous collective.

        `on_stream`: it enqueues its work on the current stream, whatever library the group belongs to.
        """
        if self.device.type == "cuda" and (on_stream or group.backend == "nccl"):
            return self._launch_on_stream(group, label, start, tensors)
        move = self.recorder.launch(group.name, label)
        ticket = Ticket(self, group, label, move, tensors)
        try:
            ticket._work = start()
        except RuntimeError as error:
            raise self.watch.explain(label, group.ranks, error) from None
        if self.recorder.active and not self.recorder.cuda:
            _stamp_when_done(ticket._work, move)
        return ticket

    def _launch_on_stream(self, group: Group, label: str, start: Callable[[], Any], tensors: Any) -> Ticket:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            move = self.recorder.launch(group.name, label)
            ticket = Ticket(self, group, label, move, tensors)
            start().wait()  # orders this stream behind the library's own; the host goes on
            move.done = self.recorder.stamp()
            ticket._event = torch.cuda.Event()
            ticket._event.record()
        return ticket


def _stamp_when_done(work: Any, move: Move) -> None:
    """Gloo finishes on its own thread: stamp there, because nobody may be waiting yet."""

    def done(_: Any) -> None:
        if move.done is None:
            move.done = time.perf_counter_ns()

    try:
        future = work.get_future()
    except RuntimeError:  # gloo's sends and receives have none: whoever waits for them stamps
        return
    future.add_done_callback(done)
