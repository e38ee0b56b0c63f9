"""All-to-all of rows over peer memory: the call of `lane.all_to_all` without a socket in between.

Each ordered pair of ranks has a flow (`ring`). Both know from their counts how many bytes go from one to
the other, so pairs without rows exchange nothing at all, and no rank waits for a rank it gets nothing from.

    launch   say where rows are wanted, copy this rank's own, and send what peers are ready for, or else what
             has room in the rings; nothing is waited for
    get      take what peers wrote and write what did not fit, until this exchange is complete

Larger results are made in this rank's peer memory (`shared/arena`), so that a sender that comes after its
receiver writes rows where they belong: one copy instead of two. One that comes first does not wait for that.

Several exchanges may be under way; their bytes follow each other, and `get` of a later one first completes
the earlier ones. Rows that fit into the rings leave at launch, so a rank may compute before it calls `get`
without holding up its peers. Larger ones leave while both sides are in `get`.

Hazard: rows must not change before `get` returns, and every exchange must be got: a rank that goes away with
half of its rows unsent lets its peers run into their deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from ctypes import memmove
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from moeclipse.comm.async_ops.lane import Awaited, InFlight, Lane, all_to_all
from moeclipse.comm.async_ops.record import TransferStamps
from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group
from moeclipse.comm.shared.arena import Arena
from moeclipse.comm.shared.host import FOLDER, PAGE, NoPeerMemoryError, PeerMemory, Use
from moeclipse.comm.transports.ring import MAX_PLACE, WORDS_PER_FLOW, Flow, Receiver, RingPlace, Sender
from moeclipse.core.errors import CommError, ConfigError

BUFFER_BYTES = 8 << 20  # of each rank, divided into one ring per peer
ARENA_BYTES = 24 << 20  # of each rank, for results
IN_ARENA_FROM = 128 << 10  # bytes of a result; smaller ones are copied in less time than memory is looked for
NAP_S = 0.001


class RingTransfer:
    """One exchange of one rank: how many bytes are still to be sent and received. Keeps its tensors alive."""

    def __init__(
        self, lane: Lane, label: str, stamps: TransferStamps | None, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        self.lane, self.label, self.stamps, self.tensors = lane, label, stamps, tensors
        self.open_bytes = 0


class PeerExchange:
    """The exchanges of one group. Open it on all its ranks; `all_to_all` is a drop-in for the module's."""

    def __init__(
        self,
        group: Group,
        watch: Watch,
        memory: PeerMemory | None,
        obstacle: str = "",
        *,
        ring_bytes: int = 0,
        arena_bytes: int = 0,
    ) -> None:
        self.group, self._watch, self._memory, self.obstacle = group, watch, memory, obstacle
        self._lock = threading.RLock()
        self._broken: str | None = None
        self._sends: list[Sender] = []
        self._receives: list[Receiver] = []
        self._arena: Arena | None = None
        if memory is None:
            return
        self._signals = memory.signals
        n, me = group.size, group.index

        def place(sender: int, receiver: int) -> RingPlace:
            ring = memory.view(sender, torch.uint8, receiver * ring_bytes, ring_bytes).data_ptr()
            buffer = memory.view(receiver, torch.uint8, 0, 1).data_ptr()
            return RingPlace(ring, ring_bytes, WORDS_PER_FLOW * (sender * n + receiver), buffer)

        if arena_bytes:
            first = memory.num_bytes - arena_bytes
            self._arena = Arena(memory.view(me, torch.uint8, first, arena_bytes), first)
        # Starting behind oneself spreads the load: at any time each rank is read by another one.
        others = [(me + step) % n for step in range(1, n)]
        self._sends = [Sender(memory.signals, place(me, peer), peer) for peer in others]
        self._receives = [Receiver(memory.signals, place(peer, me), peer) for peer in reversed(others)]

    @classmethod
    def open(
        cls,
        group: Group,
        watch: Watch,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        arena_bytes: int = ARENA_BYTES,
        spin: int | None = None,
        folder: Path = FOLDER,
    ) -> PeerExchange:
        """Collective. Where ranks cannot share memory the object still works, through torch.distributed.

        Where there is no room for `arena_bytes` besides, all rows go through the rings.
        """
        if group.size == 1:
            return cls(group, watch, None, "the group has one rank")
        if buffer_bytes < group.size:
            raise ConfigError(
                f"buffer_bytes ({buffer_bytes}) must be at least {group.size}, a byte for each rank"
            )
        ring_bytes = buffer_bytes // group.size
        first = -(-buffer_bytes // PAGE) * PAGE
        words = WORDS_PER_FLOW * group.size**2
        problem = ""
        for arena in sorted({arena_bytes if first + arena_bytes <= MAX_PLACE else 0, 0}, reverse=True):
            num_bytes = first + arena if arena else buffer_bytes
            try:
                memory = PeerMemory.open(
                    group, watch, num_bytes=num_bytes, num_words=words, spin=spin, folder=folder
                )
            except NoPeerMemoryError as error:
                problem = str(error)
            else:
                return cls(group, watch, memory, ring_bytes=ring_bytes, arena_bytes=arena)
        return cls(group, watch, None, problem)

    def should_use(self, rows: torch.Tensor) -> Use:
        if self._memory is None:
            return Use(False, self.obstacle)
        if rows.device.type != "cpu":
            return Use(
                False, f"the rows are on {rows.device}, and this exchange is between processes on the CPU"
            )
        return Use(True, "ranks share memory")

    def all_to_all(
        self,
        lane: Lane,
        group: Group,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        """Send `send_counts[p]` leading rows to each peer p, in order; receive likewise. Zeros are legal."""
        if group is not self.group and group.ranks != self.group.ranks:
            raise ConfigError(f"this exchange serves ranks {self.group.ranks}, not {group.ranks}")
        if self._memory is None or not rows.is_cpu:
            return all_to_all(lane, group, rows, send_counts, receive_counts, label, out)
        num_rows = rows.size(0)
        send_ends, receive_ends = checked_ends(num_rows, send_counts, receive_counts, group)
        if not rows.is_contiguous():
            rows = rows.detach().contiguous()
        width = rows.numel() // num_rows if num_rows else math.prod(rows.shape[1:])
        row_bytes, recorder = width * rows.dtype.itemsize, lane.recorder
        with self._lock:
            self._check_usable()
            out, place = self._room_for(rows, row_bytes, receive_ends[-1], out)
            stamps = None
            if recorder.active:
                stamps = recorder.launch(lane.name, group.name, label)
            else:
                recorder.passes(lane.name, group.name, label)
            transfer = RingTransfer(lane, label, stamps, (rows, out))
            self._launch(transfer, row_bytes, place, (send_ends, receive_ends))
        return Awaited(out, partial(self._complete, transfer))

    def _launch(
        self,
        transfer: RingTransfer,
        row_bytes: int,
        place: int | None,
        ends: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        (rows, out), (send, receive), me = transfer.tensors, ends, self.group.index
        source, target = rows.data_ptr(), out.data_ptr()
        for incoming in self._receives:
            first = receive[incoming.peer]
            count = row_bytes * (receive[incoming.peer + 1] - first)
            if count:
                wanted = None if place is None else place + row_bytes * first
                incoming.expect(target + row_bytes * first, count, transfer, wanted)
        if place is None:
            self._send(transfer, source, row_bytes, send)
        mine = row_bytes * (send[me + 1] - send[me])
        if mine:
            memmove(target + row_bytes * receive[me], source + row_bytes * send[me], mine)
        if place is not None:  # meanwhile peers may have said where they want theirs
            self._send(transfer, source, row_bytes, send)
        for incoming in self._receives:
            incoming.move()  # of earlier exchanges, too: it makes room for their senders

    def _send(self, transfer: RingTransfer, source: int, row_bytes: int, ends: Sequence[int]) -> None:
        for outgoing in self._sends:
            first = ends[outgoing.peer]
            count = row_bytes * (ends[outgoing.peer + 1] - first)
            if count:
                outgoing.send(source + row_bytes * first, count, transfer)

    def _room_for(
        self, rows: torch.Tensor, row_bytes: int, num_received: int, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, int | None]:
        """Where arriving rows go, and the place of that in this rank's peer memory if it lies there."""
        arena = self._arena
        if out is not None:
            out = room_for(rows, num_received, out)
            return out, None if arena is None else arena.place_of(out)
        if arena is not None and row_bytes * num_received >= IN_ARENA_FROM:
            taken = arena.take((num_received, *rows.shape[1:]), rows.dtype)
            if taken is not None:
                return taken
        if num_received == rows.size(0):
            return torch.empty_like(rows), None  # in half the time
        return room_for(rows, num_received, None), None

    def close(self) -> None:
        """Let go of the memory; may be called twice."""
        self._sends, self._receives, self._arena = [], [], None
        if self._memory is not None:
            self._memory.close()
        self._broken = "it was closed"

    def __enter__(self) -> PeerExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise CommError(f"this exchange cannot be used any more: {self._broken}; open a new one")

    def _complete(self, transfer: RingTransfer) -> None:
        """Take what is there, as work of this rank; only what must be waited for is communication."""
        waits = False
        if transfer.open_bytes:
            with self._lock:
                try:
                    self._check_usable()
                    self._move()
                    waits = transfer.open_bytes > 0
                    if waits:
                        self._wait(transfer)
                except BaseException as error:
                    self._broken = str(error) or type(error).__name__
                    raise
        stamps = transfer.stamps
        if stamps is not None and stamps.done is None:
            stamps.done = time.perf_counter_ns() if waits else stamps.begun
        transfer.tensors = ()

    def _wait(self, transfer: RingTransfer) -> None:
        if not transfer.lane.recorder.active:
            self._move_until_done(transfer)
            return
        with transfer.lane.recorder.waiting():
            self._move_until_done(transfer)

    def _move(self) -> bool:
        moved = False
        for flow in (*self._receives, *self._sends):
            if flow.queue and flow.move():
                moved = True
        return moved

    def _move_until_done(self, transfer: RingTransfer) -> None:
        idle_since = None
        while transfer.open_bytes:
            self._check_usable()
            waiting: list[Flow] = [flow for flow in (*self._receives, *self._sends) if flow.queue]
            # Wait a moment for one of the peers; any of the others may move meanwhile, so not for long.
            if not self._signals.soon(*waiting[0].awaited, NAP_S):
                now = time.monotonic()
                idle_since = idle_since or now
                for late in waiting:
                    self._signals.look(*late.awaited, late.peer, now - idle_since, transfer.label)
            if self._move():
                idle_since = None


@dataclass(frozen=True)
class PeerTransport:
    """A `transport.Transport` over peer memory."""

    lane: Lane
    exchange: PeerExchange

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        group = self.exchange.group
        return self.exchange.all_to_all(self.lane, group, rows, send_counts, receive_counts, label, out)


def room_for(rows: torch.Tensor, num_received: int, out: torch.Tensor | None) -> torch.Tensor:
    """Where arriving rows go: `out` if it fits, or a tensor of its own."""
    shape = (num_received, *rows.shape[1:])
    if out is None:
        return rows.new_empty(shape)
    if out.shape != shape or out.dtype != rows.dtype or not out.is_contiguous():
        raise ConfigError(f"out is {out.dtype} {tuple(out.shape)}, expected {rows.dtype} {shape}, contiguous")
    return out


def checked_ends(
    num_rows: int, send: Sequence[int], receive: Sequence[int], group: Group
) -> tuple[list[int], list[int]]:
    """Where the rows to each peer, and those from it, begin; with the end of the last ones behind them."""
    if len(send) != group.size or len(receive) != group.size or min(send) < 0 or min(receive) < 0:
        raise ConfigError(
            f"send_counts {list(send)} and receive_counts {list(receive)} "
            f"must be {group.size} numbers >= 0 each"
        )
    ends = [0, *accumulate(send)], [0, *accumulate(receive)]
    if ends[0][-1] != num_rows:
        raise ConfigError(f"send_counts {list(send)} add up to {ends[0][-1]}, but there are {num_rows} rows")
    if send[group.index] != receive[group.index]:
        raise ConfigError(
            f"rank {group.ranks[group.index]} sends {send[group.index]} rows to itself "
            f"but receives {receive[group.index]}"
        )
    return ends
