"""All-to-all of rows by copy engines, through pinned memory of the host or through the memory of peers.

    transport = pinned(mesh, mesh.experts)                 # collective; kept by the mesh
    arriving = transport.all_to_all(rows, send_counts, receive_counts, label)
    ...                                                    # compute; no processor of the device is taken
    rows = arriving.get()                                   # orders the current stream; the host goes on

For devices that cannot read each other's memory, and for several ranks that share one device and rehearse a
network: every row crosses the bus to the host and back (two ranks on an H200: 17 GB/s out and in at once).
With `through="device"` the slots lie in the senders' device memory, and receivers pull from there.

Each ordered pair of ranks has a ring of slots in the sender's buffer and two counters: slots written, counted
by the sender, and slots taken, counted by the receiver. Both sides know how many bytes go between them, so
everything is put into streams at once, and nothing has a header:

    to each peer     wait until it has taken the slot's last content | copy into the slot | count written
    from each peer   wait until it has written the slot              | copy out of it     | count taken

Sending and receiving have a stream each. Rows that do not fit into a slot go in pieces, slot after slot.
Nothing waits in a circle: piece k of an exchange waits for earlier pieces to be taken, and taking piece k
waits for piece k to be written; pieces are put in by number, both ways in turn, so that holds even where the
device runs all streams in the order of launch.

A stream that waits for a word cannot give up. A thread looks at what is under way a few times a second; when
a peer has ended or its time is up it keeps the error for the next call, and writes the awaited words itself,
so that the device comes to rest. After that rows are wrong and the exchange cannot be used any more.

On the CPU the same protocol runs on two threads per rank. There `host_ring` is faster.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal

import torch

from moeclipse.comm.async_ops.lane import Awaited, InFlight, Lane
from moeclipse.comm.async_ops.record import TransferStamps
from moeclipse.comm.gather_json import tell_all
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared.device import CudaMemory
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.comm.shared.signals import LINE
from moeclipse.comm.transports.host_ring import checked_ends, room_for
from moeclipse.comm.transports.streams import Driver, DriverStream, Mark, Stream, ThreadStream
from moeclipse.comm.transports.transport import TorchTransport, Transport
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.ops.cuda_driver import LOW
from moeclipse.ops.raw_bytes import as_bytes

SLOTS = 4
SLOT_BYTES = {"cpu": 256 << 10, "cuda": 4 << 20}
LOOK_S = 0.05
GRACE_S = 0.3  # a peer that ended may have written all that is awaited of it; the device needs a moment
FAR = 1 << 30  # as far ahead as a counter that is compared modulo 2^32 can be

Through = Literal["host", "device"]


def pinned(
    mesh: Mesh,
    group: Group,
    *,
    lane: Lane | None = None,
    through: Through = "host",
    slot_bytes: int | None = None,
    slots: int = SLOTS,
    driver: bool = True,
) -> Transport:
    """Collective over the group. Raises NoPeerMemoryError where ranks do not share a host.

    `driver=False` leaves waiting to threads, which also happens where the driver cannot wait.
    """
    lane = lane or mesh.a2a
    if group.size == 1:
        return TorchTransport(lane, group)
    slot_bytes = slot_bytes or SLOT_BYTES[mesh.device.type]
    if slot_bytes < 1 or slots < 1:
        raise ConfigError(f"slot_bytes ({slot_bytes}) and slots ({slots}) must be at least 1")
    key = f"pinned {group.name} {lane.name} {through} {slot_bytes} {slots} {driver}"

    def make() -> PinnedTransport:
        return PinnedTransport(lane, group, Slots.open(mesh, group, through, slot_bytes, slots), driver)

    return mesh.once(key, make)


class Slots:
    """Where rings and counters lie."""

    def __init__(
        self,
        memory: PeerMemory,
        device_memory: CudaMemory | None,
        group: Group,
        slot_bytes: int,
        slots: int,
    ) -> None:
        self.memory, self._device_memory, self.num_ranks = memory, device_memory, group.size
        self.slot_bytes, self.slots = slot_bytes, slots
        if device_memory is not None:
            self.buffers = device_memory.buffers  # which do not keep it alive
        else:
            self.buffers = [memory.view(rank, torch.uint8, 0, memory.num_bytes) for rank in range(group.size)]

    @classmethod
    def open(cls, mesh: Mesh, group: Group, through: Through, slot_bytes: int, slots: int) -> Slots:
        total, words = group.size * slots * slot_bytes, 2 * group.size**2
        on_device = through == "device" and mesh.device.type == "cuda"
        memory = PeerMemory.open(group, mesh.watch, num_bytes=0 if on_device else total, num_words=words)
        there = CudaMemory.open(group, mesh.watch, mesh.device, total) if on_device else None
        return cls(memory, there, group, slot_bytes, slots)

    def flow(self, sender: int, receiver: int, peer: int) -> SlotFlow:
        word, size = 2 * (sender * self.num_ranks + receiver), self.slots * self.slot_bytes
        ring = self.buffers[sender][receiver * size : (receiver + 1) * size].view(self.slots, -1)
        return SlotFlow(ring, word, word + 1, peer)


class SlotFlow:
    """One direction of one pair, as one of its ends sees it."""

    def __init__(self, ring: torch.Tensor, written: int, taken: int, peer: int) -> None:
        self.ring, self.written, self.taken, self.peer = ring, written, taken, peer
        self.count = 0  # slots that this end has put into its stream so far

    def next(self, num_bytes: int) -> torch.Tensor:
        slot = self.ring[self.count % len(self.ring)][:num_bytes]
        self.count += 1
        return slot


class CopyTransfer:
    """One exchange under way; keeps its tensors alive."""

    def __init__(self, label: str, stamps: TransferStamps, tensors: tuple[torch.Tensor, ...]) -> None:
        self.label, self.stamps, self.tensors = label, stamps, tensors
        self.begun = time.monotonic()
        self.marks: list[Mark] = []

    def done(self) -> bool:
        return all(mark.done() for mark in self.marks)


class PinnedTransport:
    """A `transport.Transport`."""

    def __init__(self, lane: Lane, group: Group, slots: Slots, driver: bool = True) -> None:
        self.lane, self.group, self._slots = lane, group, slots
        self._signals = slots.memory.signals
        me, n = group.index, group.size
        # Starting behind oneself spreads the load: at any time each rank is read by another one.
        others = [(me + step) % n for step in range(1, n)]
        self._sends = {peer: slots.flow(me, peer, peer) for peer in others}
        self._receives = {peer: slots.flow(peer, me, peer) for peer in reversed(others)}
        self._under_way: deque[CopyTransfer] = deque()
        self._failure: CommError | None = None
        self._closed = threading.Event()
        self._out, self._in = self._streams(driver)
        self.kind = type(self._out).__name__
        if isinstance(self._out, DriverStream):
            threading.Thread(target=self._watch, name="moeclipse-pinned", daemon=True).start()

    def _streams(self, wanted: bool) -> tuple[Stream, Stream]:
        """Collective on devices: either all ranks leave waiting to the driver, or none does."""
        device, signals = self.lane.device, self._signals
        if device.type == "cuda":
            driver, words, problem = self._try_driver(device) if wanted else (None, 0, "not wanted")
            label = f"opening of pinned memory, group {self.group.name}"
            found = tell_all(self.group, self.lane.watch, problem, label)
            if driver is not None and not any(found):
                return DriverStream(driver, words), DriverStream(driver, words)
        return ThreadStream("send", signals, device), ThreadStream("receive", signals, device)

    def _try_driver(self, device: torch.device) -> tuple[Driver | None, int, str]:
        """(driver, the device's address of the first word, why that does not work)."""
        memory = self._slots.memory
        try:
            driver = Driver(device)
            words = driver.register(*memory.span) + memory.words_at
            own = 2 * self.group.index * (self.group.size + 1)  # of the pair of this rank with itself
            return driver, words, driver.probe(words + own * LINE) or ""
        except (CommError, OSError, AttributeError) as error:
            return None, 0, str(error)

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        self.check()
        _, receive_ends = checked_ends(len(rows), send_counts, receive_counts, self.group)
        rows = rows.detach().contiguous()
        out = room_for(rows, receive_ends[-1], out)
        self._forget_done()
        transfer = CopyTransfer(
            label, self.lane.recorder.launch(self.lane.name, self.group.name, label), (rows, out)
        )
        row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
        sources, targets = _parts(rows, send_counts, row_bytes), _parts(out, receive_counts, row_bytes)
        self._out.begin()
        self._in.begin()
        me = self.group.index
        if targets[me].numel():
            self._in.copy(targets[me], sources[me])
        size = self._slots.slot_bytes
        longest = max(part.numel() for part in (*sources, *targets))
        for first in range(0, longest, size):
            for peer, flow in self._sends.items():
                self._send(flow, sources[peer][first : first + size], label)
            for peer, flow in self._receives.items():
                self._receive(flow, targets[peer][first : first + size], label)
        transfer.marks = [self._out.mark(), self._in.mark()]
        if isinstance(self._in, DriverStream) and self.lane.recorder.active:
            with torch.cuda.stream(self._in.stream):
                transfer.stamps.done = self.lane.recorder.stamp()
        self._under_way.append(transfer)
        return Awaited(out, partial(self._arrive, transfer))

    def _send(self, flow: SlotFlow, part: torch.Tensor, label: str) -> None:
        if part.numel():
            slot = flow.next(part.numel())
            if flow.count > self._slots.slots:
                self._out.wait(flow.taken, flow.count - self._slots.slots, flow.peer, label)
            self._out.copy(slot, part)
            self._out.write(flow.written, flow.count)

    def _receive(self, flow: SlotFlow, part: torch.Tensor, label: str) -> None:
        if part.numel():
            slot = flow.next(part.numel())
            self._in.wait(flow.written, flow.count, flow.peer, label)
            self._in.copy(part, slot)
            self._in.write(flow.taken, flow.count)

    def check(self) -> None:
        """Raise what went wrong so far, if anything did."""
        if self._failure is not None:
            raise self._failure
        if self._closed.is_set():
            raise CommError("this exchange cannot be used any more: it was closed; open a new one")

    def close(self) -> None:
        """Let go of the memory; may be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._out.close()
            self._in.close()

    def _arrive(self, transfer: CopyTransfer) -> None:
        recorder = self.lane.recorder
        with recorder.waiting():
            for mark in transfer.marks:
                mark.wait()
        transfer.tensors = ()  # whatever uses their memory next comes behind the marks
        self.check()
        if transfer.stamps.done is None:
            transfer.stamps.done = recorder.stamp()
        self._forget_done()

    def _forget_done(self) -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()

    # --- looking after streams that cannot give up -------------------------------------------------------

    def _watch(self) -> None:
        torch.cuda.set_device(self.lane.device)
        peers, deadline_s = self._signals.peers, self.lane.watch.deadline_s
        ended_at: float | None = None
        while not self._closed.wait(LOOK_S):
            oldest = next((transfer for transfer in list(self._under_way) if not transfer.done()), None)
            if oldest is None:
                continue
            now, late = time.monotonic(), self._late()
            ended = [peer for peer in late if peers.ended(peer)]
            ended_at = (ended_at or now) if ended else None
            if ended_at is not None and now - ended_at > GRACE_S:
                self._fail(self._lost(ended[0], oldest.label))
                return
            if now - oldest.begun > deadline_s and late:
                self._fail(peers.missing(late, oldest.label))
                return

    def _late(self) -> list[int]:
        """Peers that have not written or taken what is awaited of them; some of it may not be due yet."""
        read, slots = self._signals.read, self._slots.slots
        behind = [flow.peer for flow in self._receives.values() if _short(read(flow.written), flow.count)]
        behind += [flow.peer for flow in self._sends.values() if _short(read(flow.taken), flow.count - slots)]
        return sorted(set(behind))

    def _lost(self, peer: int, label: str) -> CommError:
        try:
            return self._signals.peers.lost(peer, label)
        except CommError as error:  # it has said itself why it failed
            return error

    def _fail(self, error: CommError) -> None:
        self._failure = error
        for word, flow in [
            *((flow.written, flow) for flow in self._receives.values()),
            *((flow.taken, flow) for flow in self._sends.values()),
        ]:
            self._signals.write(word, (flow.count + FAR) & LOW)


def _short(value: int, wanted: int) -> bool:
    """Whether a counter, compared modulo 2^32, is behind."""
    return wanted > 0 and (value - wanted) & LOW >= 1 << 31


def _parts(rows: torch.Tensor, counts: Sequence[int], row_bytes: int) -> list[torch.Tensor]:
    """The bytes of each peer's rows."""
    flat = as_bytes(rows)
    ends = [0, *accumulate(count * row_bytes for count in counts)]
    return [flat[start:stop] for start, stop in pairwise(ends)]
