"""Rows between ranks over gloo: ready to receive first, then send, one peer after the other.

Gloo sends rows once it has heard that its peer is ready for them, and that word travels on the connection of
the rows. Its all-to-all sends first and says it is ready afterwards: the word stands behind the rows, and two
ranks that send to each other take turns on a link that could carry both ways at once. Sending to all peers at
once, it also lets several senders meet at one receiver while other links rest.

    launch      receives are posted at once                                        (the caller's thread)
    sender      sends to the next rank of the ring, waits for its receipt, ...
    receiver    waits for what arrives, and signs for it

That a send is done says that its rows are in some buffer, not that they are through. So whoever gets many of
them signs, and the next peer's turn comes with that: rows that are needed first do not share the link with
those needed later. The receipt is sent a little before the end and comes back about at it; the link does not
rest meanwhile. It travels over the default group, where it does not stand behind rows. Nobody waits in a
circle: sends and receives of all ranks stand in one order (parcel, step around the ring), and of those that
are not through the first one can always go on.

Contract: all ranks of a group hand parcels over in one order, as with collectives; what a rank sends to
another is what that one expects. Hazard: what comes behind a failed parcel fails, too, because ranks would no
longer be at the same place.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moeclipse.comm.flight.promise import Promise

if TYPE_CHECKING:
    from moeclipse.comm.group import Group

TAG, RECEIPT = 4919, 4920
"""Of rows and of receipts; whoever else sends in the same group uses others. Receipts of two couriers may be
taken for each other: as many come as are waited for, and none depends on who took it."""
LARGE = 64 << 10
"""Bytes from which on rows are signed for. Fewer cost latency, not the link."""
REST = 192 << 10
"""Bytes that may be under way when the receipt is sent: about what a link holds in its buffers."""


def in_parts(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is signed for and the rest, or all in one where nobody signs; alike at both ends."""
    flat = rows.view(-1)
    if flat.nbytes < LARGE:
        return (flat,) if len(flat) else ()
    rest = min(REST // flat.itemsize, len(flat) // 2)
    return flat[:-rest], flat[-rest:]


class Leg:
    """Rows to one peer, and those that come from another; what comes is expected from the start."""

    def __init__(self, rows: torch.Tensor, to: int, place: torch.Tensor, source: int, handle: Any) -> None:
        self.rows, self.to, self.source, self.handle = in_parts(rows), to, source, handle
        self.expected: list[Any] = [
            dist.irecv(part, source, group=handle, tag=TAG) for part in in_parts(place)
        ]

    def send(self) -> None:
        """Returns when these rows do not need the link any more."""
        receipt: Any = None
        if len(self.rows) > 1:
            receipt = dist.irecv(torch.empty(1, dtype=torch.uint8), self.to, tag=RECEIPT)
        sends: list[Any] = [dist.isend(part, self.to, group=self.handle, tag=TAG) for part in self.rows]
        for send in sends:
            send.wait()
        if receipt is not None:
            receipt.wait()

    def receive(self) -> Any:
        """Returns when all is there; the receipt, if one was sent, is still to be waited for."""
        receipt = None
        for number, expected in enumerate(self.expected):
            expected.wait()
            if number == 0 and len(self.expected) > 1:
                receipt = dist.isend(torch.zeros(1, dtype=torch.uint8), self.source, tag=RECEIPT)
        return receipt


class Parcel(Promise):
    """Rows under way to some peers and from some; to a lane it looks like one transfer."""

    def __init__(self, legs: list[Leg]) -> None:
        super().__init__()
        self.legs = legs
        self._to_do, self._lock = 2, threading.Lock()

    def send(self) -> None:
        for leg in self.legs:
            leg.send()

    def receive(self) -> None:
        receipts = [leg.receive() for leg in self.legs]
        for receipt in receipts:
            if receipt is not None:
                receipt.wait()

    def finish(self, error: Exception | None) -> None:
        """One of sending and receiving has ended; neither waits for the other."""
        with self._lock:
            self._to_do -= 1
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            elif self._to_do == 0:
                self.legs = []
                self.future.set_result(None)


Parcels = queue.SimpleQueue[Parcel | None]


class Courier:
    """Delivers the parcels of one group; its threads start with the first and end with it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._queues: tuple[Parcels, Parcels] = (queue.SimpleQueue(), queue.SimpleQueue())
        self._started = False

    def send(self, leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Parcel:
        """leaving[p] goes to the group's rank p, arriving[p] comes from there; a rank's own is copied."""
        me, ranks, handle = self.group.index, self.group.ranks, self.group.handle
        arriving[me].copy_(leaving[me])
        legs = []
        for step in range(1, len(ranks)):
            to, source = (me + step) % len(ranks), (me - step) % len(ranks)
            legs.append(Leg(leaving[to], ranks[to], arriving[source], ranks[source], handle))
        parcel = Parcel(legs)
        if not self._started:
            self._start()
        for parcels in self._queues:
            parcels.put(parcel)
        return parcel

    def _start(self) -> None:
        self._started = True
        works = (Parcel.send, Parcel.receive)
        for parcels, work in zip(self._queues, works, strict=True):  # threads must not keep `self` alive
            threading.Thread(target=_work, args=(parcels, work), daemon=True).start()
            weakref.finalize(self, parcels.put, None)


def _work(parcels: Parcels, work: Callable[[Parcel], None]) -> None:
    """Do `work` on one parcel after the other, until it fails."""
    broken: Exception | None = None
    while (parcel := parcels.get()) is not None:
        error: Exception | None = None
        if broken is not None:
            error = RuntimeError(f"an earlier exchange has failed: {broken}")
        else:
            try:
                work(parcel)
            except Exception as failure:
                error = broken = failure
        parcel.finish(error)
        del parcel, error
