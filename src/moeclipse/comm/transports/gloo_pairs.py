"""Rows between ranks over gloo: ready to receive first, then send, one peer after the other.

Gloo sends rows once it has heard that its peer is ready for them, and that word travels on the connection of
the rows. Its all-to-all sends first and says it is ready afterwards: the word stands behind the rows, and two
ranks that send to each other take turns on a link that could carry both ways at once. Sending to all peers at
once, it also lets several senders meet at one receiver while other links rest.

    launch      receives are posted at once                                        (the caller's thread)
    sender      sends to the next rank of the ring, waits for its acknowledgement, ...
    receiver    waits for what arrives, and acknowledges it

That a send is done says that its rows are in some buffer, not that they are through. So whoever gets many of
them acknowledges, and the next peer's turn comes with that: rows that are needed first do not share the link
with those needed later. The acknowledgement is sent a little before the end and comes back about at it; the
link does not rest meanwhile. It travels over the default group, where it does not stand behind rows. Nobody
waits in a circle: sends and receives of all ranks stand in one order (exchange, step around the ring), and of
those that are not through the first one can always go on.

Contract: all ranks of a group call `exchange` in one order, as with collectives; what a rank sends to another
is what that one expects. Hazard: what comes behind a failed exchange fails, too, because ranks would no
longer be at the same place.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.work import OwnWork

if TYPE_CHECKING:
    from moeclipse.comm.group import Group

TAG, ACK = 4919, 4920
"""Of rows and of acknowledgements; whoever else sends in the same group uses others. Acknowledgements of two
groups may be taken for each other: as many come as are waited for, and none depends on who took it."""
LARGE = 64 << 10
"""Bytes from which on rows are acknowledged. Fewer cost latency, not the link."""
REST = 192 << 10
"""Bytes that may be under way when the acknowledgement is sent: about what a link holds in its buffers."""


def in_parts(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is acknowledged and the rest, or all in one where nobody acknowledges; alike at both ends."""
    flat = rows.view(-1)
    if flat.nbytes < LARGE:
        return (flat,) if len(flat) else ()
    rest = min(REST // flat.itemsize, len(flat) // 2)
    return flat[:-rest], flat[-rest:]


def launched(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is no member of the group"
    return work


class RingStep:
    """Rows to one peer, and those that come from another; what comes is expected from the start."""

    def __init__(
        self, rows: torch.Tensor, to: int, place: torch.Tensor, source: int, handle: dist.ProcessGroup | None
    ) -> None:
        self.rows, self.to, self.source, self.handle = in_parts(rows), to, source, handle
        self.expected = [
            launched(dist.irecv(part, source, group=handle, tag=TAG)) for part in in_parts(place)
        ]

    def send(self) -> None:
        """Returns when these rows do not need the link any more."""
        ack = None
        if len(self.rows) > 1:
            ack = dist.irecv(torch.empty(1, dtype=torch.uint8), self.to, tag=ACK)
        sends = [launched(dist.isend(part, self.to, group=self.handle, tag=TAG)) for part in self.rows]
        for send in sends:
            send.wait()
        if ack is not None:
            ack.wait()

    def receive(self) -> dist.Work | None:
        """Returns when all is there; the acknowledgement, if one was sent, is still to be waited for."""
        ack = None
        for number, expected in enumerate(self.expected):
            expected.wait()
            if number == 0 and len(self.expected) > 1:
                ack = dist.isend(torch.zeros(1, dtype=torch.uint8), self.source, tag=ACK)
        return ack


class PairsWork(OwnWork):
    """One exchange with all peers; to a lane it looks like one transfer."""

    def __init__(self, steps: list[RingStep]) -> None:
        super().__init__()
        self.steps = steps
        self._to_do, self._lock = 2, threading.Lock()

    def send(self) -> None:
        for step in self.steps:
            step.send()

    def receive(self) -> None:
        acks = [step.receive() for step in self.steps]
        for ack in acks:
            if ack is not None:
                ack.wait()

    def finish(self, error: Exception | None) -> None:
        """One of sending and receiving has ended; neither waits for the other."""
        with self._lock:
            self._to_do -= 1
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            elif self._to_do == 0:
                self.steps = []
                self.future.set_result(None)


WorkQueue = queue.SimpleQueue[PairsWork | None]


class GlooPairs:
    """The exchanges of one group; its threads start with the first one and end with it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._queues: tuple[WorkQueue, WorkQueue] = (queue.SimpleQueue(), queue.SimpleQueue())
        self._started = False

    def exchange(self, leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> PairsWork:
        """leaving[p] goes to the group's rank p, arriving[p] comes from there; a rank's own is copied."""
        me, ranks, handle = self.group.index, self.group.ranks, self.group.handle
        arriving[me].copy_(leaving[me])
        steps = []
        for distance in range(1, len(ranks)):
            to, source = (me + distance) % len(ranks), (me - distance) % len(ranks)
            steps.append(RingStep(leaving[to], ranks[to], arriving[source], ranks[source], handle))
        work = PairsWork(steps)
        if not self._started:
            self._start()
        for waiting in self._queues:
            waiting.put(work)
        return work

    def _start(self) -> None:
        self._started = True
        halves = (PairsWork.send, PairsWork.receive)
        for waiting, half in zip(self._queues, halves, strict=True):  # threads must not keep `self` alive
            threading.Thread(target=_run, args=(waiting, half), daemon=True).start()
            weakref.finalize(self, waiting.put, None)


def _run(waiting: WorkQueue, half: Callable[[PairsWork], None]) -> None:
    """Do one half of one exchange after the other, until one fails."""
    broken: Exception | None = None
    while (work := waiting.get()) is not None:
        error: Exception | None = None
        if broken is not None:
            error = RuntimeError(f"an earlier exchange has failed: {broken}")
        else:
            try:
                half(work)
            except Exception as failure:
                error = broken = failure
        work.finish(error)
        del work, error
