"""Rows between ranks over gloo: ready to receive first, then send, one peer after the other.

Gloo sends rows once it has heard that its peer is ready for them, and that word travels on the connection of
the rows. Its all-to-all sends first and says it is ready afterwards: the word stands behind the rows, and two
ranks that send to each other take turns on a link that could carry both ways at once. Sending to all peers at
once, it also lets several senders meet at one receiver while other links rest.

    launch      receives are posted at once                                        (the caller's thread)
    sender      sends to the next rank of the ring, waits for the one before, ...
    receiver    waits for what arrives, and says so

A parcel is sent when the one before has been sent and, as far as one can tell, is through: what arrived in
exchange for it is here. So rows that are needed first do not share the link with those needed later. Where
what is exchanged is unequal, that tells nothing, and nobody waits: links would rest. Nobody waits in a
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
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moeclipse.comm.promise import Promise

if TYPE_CHECKING:
    from moeclipse.comm.mesh import Group

TAG = 4919
"""Of parcels; whoever else sends in the same group uses another."""
LARGE = 32 << 10
"""Bytes from which on the next peer waits for this one. Small rows cost latency, not the link."""
ALIKE = 1.25
"""What arrives tells when the rows are through if it is at most so many times more or less than they are."""


class Leg:
    """Rows to one peer, and those that come from another in exchange."""

    def __init__(self, rows: torch.Tensor, to: int, place: torch.Tensor, receive: Any) -> None:
        self.rows, self.to, self.receive = rows, to, receive
        less, more = sorted((rows.nbytes, place.nbytes))
        self.paces = less >= LARGE and more <= ALIKE * less
        self.arrived = threading.Event()


class Parcel(Promise):
    """Rows under way to some peers and from some; to a lane it looks like one transfer."""

    def __init__(self, legs: list[Leg]) -> None:
        super().__init__()
        self.legs = legs
        self.sent: Future[None] = Future()

    def send(self, handle: Any) -> None:
        for leg in self.legs:
            if len(leg.rows):
                work: Any = dist.isend(leg.rows, leg.to, group=handle, tag=TAG)
                work.wait()
            if leg.paces:
                leg.arrived.wait()

    def receive(self) -> None:
        try:
            for leg in self.legs:
                if leg.receive is not None:
                    leg.receive.wait()
                leg.arrived.set()
            self.sent.result()
        finally:
            for leg in self.legs:
                leg.arrived.set()  # nobody shall wait for what will not come
            self.legs = []


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
            place = arriving[source]
            receive = dist.irecv(place, ranks[source], group=handle, tag=TAG) if len(place) else None
            legs.append(Leg(leaving[to], ranks[to], place, receive))
        parcel = Parcel(legs)
        if not self._started:
            self._start()
        for parcels in self._queues:
            parcels.put(parcel)
        return parcel

    def _start(self) -> None:
        self._started = True
        (to_send, to_receive), handle = self._queues, self.group.handle  # threads must not keep `self` alive
        works: tuple[tuple[Parcels, Callable[[Parcel], None], Callable[[Parcel], Future[None]]], ...] = (
            (to_send, lambda parcel: parcel.send(handle), lambda parcel: parcel.sent),
            (to_receive, Parcel.receive, lambda parcel: parcel.future),
        )
        for parcels, work, future in works:
            threading.Thread(target=_work, args=(parcels, work, future), daemon=True).start()
            weakref.finalize(self, parcels.put, None)


def _work(
    parcels: Parcels, work: Callable[[Parcel], None], future_of: Callable[[Parcel], Future[None]]
) -> None:
    """Do `work` on one parcel after the other, until it fails."""
    broken: Exception | None = None
    while (parcel := parcels.get()) is not None:
        future = future_of(parcel)
        try:
            if broken is not None:
                raise RuntimeError(f"an earlier exchange has failed: {broken}")
            work(parcel)
        except Exception as error:
            broken = broken or error
            future.set_exception(error)
        else:
            future.set_result(None)
        del parcel
