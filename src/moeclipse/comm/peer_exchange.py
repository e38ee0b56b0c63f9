"""All-to-all of rows over peer memory: the call of `exchange.all_to_all` without a socket in between.

Each ordered pair of ranks has a ring of bytes in the sender's buffer and two counters: bytes written, posted
by the sender, and bytes taken, posted by the receiver. Both know from their counts how many bytes go from one
to the other, so a message needs no header, pairs without rows exchange nothing at all, and no rank waits for
a rank it gets nothing from.

    launch   copy rows into the rings as far as they have room; nothing is waited for
    get      take what peers wrote and write what did not fit, until this exchange is complete

Several exchanges may be under way; their bytes follow each other in the rings, and `get` of a later one first
completes the earlier ones. Rows that fit into the rings leave at launch, so a rank may compute before it
calls `get` without holding up its peers. Larger ones leave while both sides are in `get`.

Hazard: rows must not change before `get` returns, and every exchange must be got: a rank that goes away with
half of its rows unsent lets its peers run into their deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from ctypes import memmove
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from moeclipse.comm import exchange
from moeclipse.comm.exchange import Result
from moeclipse.comm.failure import Watch
from moeclipse.comm.lane import Lane
from moeclipse.comm.mesh import Group
from moeclipse.comm.peer_memory import FOLDER, NoPeerMemoryError, PeerMemory
from moeclipse.comm.peer_pending import Use
from moeclipse.comm.record import Move
from moeclipse.core.errors import CommError, ConfigError

BUFFER_BYTES = 8 << 20  # of each rank, divided into one ring per peer
PIECE_BYTES = 512 << 10  # posted at a time, so that a peer can take while we write
NAP_S = 0.001


class PeerResult(Result):
    """Rows that may still be in the rings; `get` completes them."""

    def __init__(self, value: torch.Tensor, transfer: Transfer, owner: PeerExchange) -> None:
        super().__init__(value)
        self._transfer: Transfer | None = transfer
        self._owner = owner

    def get(self) -> torch.Tensor:
        if self._transfer is not None:
            self._owner._complete(self._transfer)
            self._transfer = None
        return self._value


class Transfer:
    """One exchange of one rank: how many bytes are still to be sent and received. Keeps its tensors alive."""

    def __init__(self, lane: Lane, label: str, move: Move, tensors: tuple[torch.Tensor, ...]) -> None:
        self.lane, self.label, self.move, self.tensors = lane, label, move, tensors
        self.open_bytes = 0


class Flow:
    """One direction of one pair: a ring, a counter each for its two ends, and what waits to pass.

    Bytes are moved by address: slicing tensors would take longer than copying a few kilobytes.
    """

    def __init__(self, ring: torch.Tensor, written_word: int, taken_word: int, peer: int) -> None:
        self.ring, self.peer = ring, peer
        self.written_word, self.taken_word = written_word, taken_word
        self.address, self.room = ring.data_ptr(), ring.numel()
        self.position = 0  # bytes that this rank has written (or taken) so far
        self.queue: deque[list[Any]] = deque()  # [address, bytes left, transfer]

    def add(self, address: int, count: int, transfer: Transfer) -> None:
        transfer.open_bytes += count
        self.queue.append([address, count, transfer])

    def move(self, available: int, outward: bool) -> int:
        """Copy the next bytes between queue and ring: at most a piece, or up to the end of the ring."""
        entry = self.queue[0]
        start = self.position % self.room
        count = min(available, entry[1], PIECE_BYTES, self.room - start)
        if count:
            inside, outside = self.address + start, entry[0]
            memmove(inside if outward else outside, outside if outward else inside, count)
            self.position += count
            entry[0] += count
            entry[1] -= count
            entry[2].open_bytes -= count
            if not entry[1]:
                self.queue.popleft()
        return count


class PeerExchange:
    """The exchanges of one group. Open it on all its ranks; `all_to_all` is a drop-in for the module's."""

    def __init__(self, group: Group, watch: Watch, memory: PeerMemory | None, obstacle: str = "") -> None:
        self.group, self._watch, self._memory, self.obstacle = group, watch, memory, obstacle
        self._lock = threading.RLock()
        self._broken: str | None = None
        self._sends: list[Flow] = []
        self._receives: list[Flow] = []
        if memory is None:
            return
        self._signals = memory.signals
        n, me = group.size, group.index
        ring_bytes = memory.num_bytes // n

        def flow(sender: int, receiver: int, peer: int) -> Flow:
            word = 2 * (sender * n + receiver)
            ring = memory.view(sender, torch.uint8, receiver * ring_bytes, ring_bytes)
            return Flow(ring, word, word + 1, peer)

        # Starting behind oneself spreads the load: at any time each rank is read by another one.
        others = [(me + step) % n for step in range(1, n)]
        self._sends = [flow(me, peer, peer) for peer in others]
        self._receives = [flow(peer, me, peer) for peer in reversed(others)]

    @classmethod
    def open(
        cls,
        group: Group,
        watch: Watch,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        spin: int | None = None,
        folder: Path = FOLDER,
    ) -> PeerExchange:
        """Collective. Where ranks cannot share memory the object still works, through torch.distributed."""
        if group.size == 1:
            return cls(group, watch, None, "the group has one rank")
        if buffer_bytes < group.size:
            raise ConfigError(
                f"buffer_bytes ({buffer_bytes}) must be at least {group.size}, a byte for each rank"
            )
        words = 2 * group.size**2
        try:
            memory = PeerMemory.open(
                group, watch, num_bytes=buffer_bytes, num_words=words, spin=spin, folder=folder
            )
        except NoPeerMemoryError as error:
            return cls(group, watch, None, str(error))
        return cls(group, watch, memory)

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
    ) -> Result:
        """Send `send_counts[p]` leading rows to each peer p, in order; receive likewise. Zeros are legal."""
        if group is not self.group and group.ranks != self.group.ranks:
            raise ConfigError(f"this exchange serves ranks {self.group.ranks}, not {group.ranks}")
        if self._memory is None or not rows.is_cpu:
            return exchange.all_to_all(lane, group, rows, send_counts, receive_counts, label, out)
        send_ends, receive_ends = checked_ends(len(rows), send_counts, receive_counts, group)
        rows = rows.detach().contiguous()
        row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
        out = room_for(rows, receive_ends[-1], out)
        source, target, me = rows.data_ptr(), out.data_ptr(), group.index
        with self._lock:
            self._check_usable()
            transfer = Transfer(lane, label, lane.recorder.launch(group.name, label), (rows, out))
            for flow in self._sends:
                count = row_bytes * send_counts[flow.peer]
                if count:
                    flow.add(source + row_bytes * send_ends[flow.peer], count, transfer)
                    self._push(flow)
            for flow in self._receives:
                count = row_bytes * receive_counts[flow.peer]
                if count:
                    flow.add(target + row_bytes * receive_ends[flow.peer], count, transfer)
                self._pull(flow)  # of earlier exchanges, too: it makes room for their senders
            mine = row_bytes * send_counts[me]
            if mine:
                memmove(target + row_bytes * receive_ends[me], source + row_bytes * send_ends[me], mine)
        return PeerResult(out, transfer, self)

    def close(self) -> None:
        """Let go of the memory; may be called twice."""
        self._sends, self._receives = [], []
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

    def _push(self, flow: Flow) -> bool:
        """Write what there is room for; whether anything moved."""
        begun, signals = flow.position, self._signals
        while flow.queue:
            if not flow.move(flow.room - flow.position + signals.read(flow.taken_word), True):
                break
            signals.post(flow.written_word, flow.position)
        return flow.position > begun

    def _pull(self, flow: Flow) -> bool:
        """Take what the peer wrote; whether anything moved."""
        begun, signals = flow.position, self._signals
        while flow.queue:
            if not flow.move(signals.read(flow.written_word) - flow.position, False):
                break
            signals.post(flow.taken_word, flow.position)
        return flow.position > begun

    def _complete(self, transfer: Transfer) -> None:
        """Take what is there, as work of this rank; only what must be waited for is communication."""
        recorder = transfer.lane.recorder
        with self._lock:
            try:
                if transfer.open_bytes:
                    self._check_usable()
                    self._move()
                waits = transfer.open_bytes > 0
                if waits:
                    with recorder.waiting():
                        self._move_until_done(transfer)
            except BaseException as error:
                self._broken = str(error) or type(error).__name__
                raise
        if transfer.move.done is None:
            transfer.move.done = time.perf_counter_ns() if waits else transfer.move.begun
        transfer.tensors = ()

    def _move(self) -> bool:
        moved = [self._pull(flow) for flow in self._receives] + [self._push(flow) for flow in self._sends]
        return any(moved)

    def _move_until_done(self, transfer: Transfer) -> None:
        idle_since = time.monotonic()
        while transfer.open_bytes:
            self._check_usable()
            if self._move():
                idle_since = time.monotonic()
            elif transfer.open_bytes:
                self._rest(transfer, time.monotonic() - idle_since)

    def _rest(self, transfer: Transfer, idle_s: float) -> None:
        """Wait a moment for one of the peers; any of the others may have moved meanwhile, so not for long."""
        receives = [(flow, flow.written_word) for flow in self._receives if flow.queue]
        sends = [(flow, flow.taken_word) for flow in self._sends if flow.queue]
        waiting = receives + sends
        flow, word = waiting[0]
        seen = flow.position if receives else flow.position - flow.room
        if self._signals.soon(word, seen + 1, NAP_S):
            return
        for late, awaited in waiting:
            behind = late.position if awaited == late.written_word else late.position - late.room
            self._signals.look(awaited, behind + 1, late.peer, idle_s, transfer.label)


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
    ) -> Result:
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
