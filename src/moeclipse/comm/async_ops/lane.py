"""A lane, a FIFO of asynchronous communication, and what is in flight on it.

    rows = lane.launch(group, "dispatch rows, layer 3", lambda: dist.all_to_all_single(out, ...), out)
    ...                  # compute that does not need the result
    rows.get()           # from here on `out` may be used

Whatever is launched is an `InFlight`: a transfer on a lane (`Transfer`), what is there already (`Ready`),
what somebody else waits for (`Awaited`), what is still to be done with it when it has come (`Then`), and
several as one (`Joined`). What is in flight must be got; `get` may be called again and returns the same.

On CUDA a lane is a stream: the transfer starts after everything the current stream holds at launch,
and `get` orders the current stream behind it without blocking the host. On CPU the transfer runs on
gloo's own threads and `get` blocks, no longer than the deadline. Order comes from events alone, never from a
driver setting.

A transfer keeps its tensors alive until it is waited for; every transfer must be waited for.

Rows go by `all_to_all` and numbers by `gather`; `TorchTransport` is the wire that is made of them. With one
rank in the group nothing is sent and no copy is made. Sums are in `exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.record import Recorder, TransferStamps
from moeclipse.comm.async_ops.work import Waitable
from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group
from moeclipse.comm.transports.gloo_pairs import GlooPairs, PairsWork
from moeclipse.comm.watch.op_log import LoggedOp

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Source = TypeVar("Source")
# Newer torch renames it and warns about the old name.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SPIN_S = 2e-3  # how long the host spins for a result before it lets others have the core


class InFlight(Protocol[T_co]):
    def get(self) -> T_co:
        """Wait until what follows may use the result, and return it."""
        ...


@dataclass(slots=True)
class Ready(Generic[T]):
    """There already: nothing was sent, or whoever comes next waits by itself."""

    value: T

    def get(self) -> T:
        return self.value


@dataclass(slots=True)
class Awaited(Generic[T]):
    """`value` may be used after `wait` has returned; it is called once, and let go then."""

    value: T
    wait: Callable[[], object] | None

    def get(self) -> T:
        if self.wait is not None:
            self.wait()
            self.wait = None
        return self.value


@dataclass(slots=True)
class Then(Generic[Source, T]):
    """What `finish` makes of something in flight, once it has come; both are let go then."""

    source: InFlight[Source] | None
    finish: Callable[[Source], T] | None
    value: T = field(init=False)

    def get(self) -> T:
        if self.source is not None and self.finish is not None:
            self.value = self.finish(self.source.get())
            self.source = self.finish = None
        return self.value


class Joined:
    """Launched one after the other, waited for as one."""

    def __init__(self, several: Iterable[InFlight[object] | None]) -> None:
        self._several = [one for one in several if one is not None]

    def get(self) -> None:
        for one in self._several:
            one.get()


@dataclass
class Transfer(Generic[T]):
    """A transfer under way: what it brings, and what it needs until it is done."""

    _lane: Lane
    _group: Group
    _stamps: TransferStamps | None
    """None: nobody records the step, and no ledger checks it."""
    _op: LoggedOp
    _value: T
    _keep: object
    _work: Waitable | None = None
    _event: Any = None
    _waited: bool = False

    def get(self) -> T:
        """Let what follows use the result."""
        if not self._waited:
            self._wait(self._op.patience_s)
        return self._value

    def settle(self, patience_s: float | None = None) -> T:
        """Wait on the host until the result is there. `patience_s` replaces the deadline where peers may
        be slow."""
        patience_s = self._op.patience_s = patience_s or self._op.patience_s
        if not self._waited:
            self._wait(patience_s)
        if self._event is not None:
            poll(self._event, self._lane.watch, self._op.label, self._group.ranks, patience_s)
        return self._value

    def _wait(self, patience_s: float | None) -> None:
        self._waited = True
        recorder = self._lane.recorder
        with recorder.waiting() if recorder.active else nullcontext():
            if self._event is not None:
                torch.cuda.current_stream(self._lane.device).wait_event(self._event)
            else:
                self._op.waited = time.monotonic()
                self._block(patience_s)
                self._op.done = time.monotonic()
                if (log := self._lane.watch.log).in_file:
                    log.write_end(self._op)
        if self._stamps is not None and self._stamps.done is None:
            self._stamps.done = time.perf_counter_ns()
        self._keep = self._work = None  # a Work may hold tensors, too

    def _block(self, patience_s: float | None) -> None:
        watch = self._lane.watch
        assert self._work is not None
        try:
            self._work.wait(timedelta(seconds=patience_s or watch.deadline_s))
        except RuntimeError as error:
            raise watch.explain(self._op.label, self._group.ranks, error, self._lane.name) from None


class CapturedTransfer(Transfer[T]):
    """Part of a graph: whatever is captured behind it may use what it brings, and the host never can."""

    def __init__(self, label: str, value: T) -> None:
        self._label, self._value = label, value

    def get(self) -> T:
        return self._value

    def settle(self, patience_s: float | None = None) -> T:
        del patience_s
        raise RuntimeError(f"the host would wait for {self._label}, which a graph cannot")


@dataclass(frozen=True)
class OnHost:
    """A transfer's numbers as a list: here the host waits for the device, so deadlines count here."""

    transfer: Transfer[torch.Tensor]

    def get(self) -> list[Any]:
        found: list[Any] = self.transfer.settle().tolist()
        return found


class Lane:
    def __init__(self, name: str, device: torch.device, recorder: Recorder, watch: Watch) -> None:
        self.name, self.recorder, self.watch = name, recorder, watch
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def by_stream(self, group: Group) -> bool:
        """Whether collectives of this group follow the current stream, and so need not be asynchronous."""
        return self.device.type == "cuda" and group.backend == "nccl"

    def collective(
        self, group: Group, label: str, start: Callable[..., Waitable | None], value: T, keep: object = None
    ) -> Transfer[T]:
        """`launch` of a call of torch.distributed, which takes `async_op`."""
        by_stream = self.by_stream(group)
        call = partial(start, async_op=not by_stream)
        return self.launch(group, label, call, value, keep, on_stream=by_stream)

    def launch(
        self,
        group: Group,
        label: str,
        start: Callable[[], Waitable | None],
        value: T,
        keep: object = None,
        *,
        on_stream: bool = False,
    ) -> Transfer[T]:
        """Start a transfer that brings `value`; `start` returns the Work of an asynchronous collective, or
        None if it is on the current stream (`by_stream`).

        `keep`: what it reads, kept until it is waited for. `on_stream`: it enqueues its work on the current
        stream, whatever library the group belongs to.
        """
        if self.recorder.capturing:
            return self._capture(group, label, start, value)
        if on_stream or self.by_stream(group):
            return self._launch_on_stream(group, label, start, value, keep)
        recorder, stamps = self.recorder, None
        if recorder.cuda or recorder.active or recorder.ledger is not None:
            stamps = recorder.launch(self.name, group.name, label)
        op = self._logged_on_host(label, group.ranks)
        transfer = Transfer(self, group, stamps, op, value, keep)
        try:
            transfer._work = start()
        except RuntimeError as error:
            raise self.watch.explain(label, group.ranks, error, self.name) from None
        if stamps is not None and recorder.active and not recorder.cuda:
            _stamp_when_done(transfer._work, stamps)
        return transfer

    def _logged_on_host(self, label: str, ranks: tuple[int, ...]) -> LoggedOp:
        """What no stream runs: it starts at once, and the host waits for it."""
        log, now = self.watch.log, time.monotonic()
        op = LoggedOp(
            number=next(log.numbers),
            lane=self.name,
            label=label,
            ranks=ranks,
            launched=now,
            started=now,
            on_host=True,
            patience_s=log.patience_s,
        )
        log.recent.append(op)
        if log.in_file:
            log.write(op)
        return op

    def _capture(
        self, group: Group, label: str, start: Callable[[], Waitable | None], value: T
    ) -> Transfer[T]:
        """Into a graph, on the stream that is captured: nobody can stamp, watch or wait for it there."""
        self.recorder.passes(self.name, group.name, label)
        if (work := start()) is not None:
            work.wait()
        return CapturedTransfer(label, value)

    def _launch_on_stream(
        self, group: Group, label: str, start: Callable[[], Waitable | None], value: T, keep: object
    ) -> Transfer[T]:
        # Hundreds of times in a step: the device is named wherever torch would have to find it out, which
        # takes longer than what is asked for.
        current = torch.cuda.current_stream(self.device)
        if self._stream is None:
            # torch hands out 32 streams of each priority in turn, and NCCL takes one of those without for
            # each communicator: a lane that got one of them a second time would wait for what is on it.
            self._stream = torch.cuda.Stream(self.device, priority=-1)
        stream = self._stream
        stream.wait_stream(current)
        torch.cuda.set_stream(stream)
        try:
            stamps = self.recorder.launch(self.name, group.name, label)
            log, handle = self.watch.log, stream.cuda_stream
            op = log.launch(self.name, label, group.ranks)
            transfer = Transfer(self, group, stamps, op, value, keep)
            log.start(op, handle)
            work = start()
            if work is not None:  # on a stream of the library's own: order this one behind it
                work.wait()
            log.end(op, handle)
            stamps.done = self.recorder.stamp()
            transfer._event = stamps.done if self.recorder.cuda else stream.record_event()
        finally:
            torch.cuda.set_stream(current)
        return transfer


def all_to_all(
    lane: Lane,
    group: Group,
    rows: torch.Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    label: str,
    out: torch.Tensor | None = None,
) -> InFlight[torch.Tensor]:
    """Send `send_counts[p]` leading rows to each peer p, in order; receive likewise. Zeros are legal."""
    if group.size == 1:
        return Ready(rows if out is None else out.copy_(rows))
    rows = rows.contiguous()
    if out is None:
        out = rows.new_empty((sum(receive_counts), *rows.shape[1:]))

    given = (out, rows, list(receive_counts), list(send_counts), group.handle)
    return lane.collective(group, label, partial(dist.all_to_all_single, *given), out, rows)


@dataclass(frozen=True)
class TorchTransport:
    """The wire (`Transport`) that is torch's own all-to-all.

    `pairs`: sends and receives of our own, on all ranks of the group or on none; rows are on the CPU.
    """

    lane: Lane
    group: Group
    pairs: GlooPairs | None = None

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        pairs = self.pairs
        if pairs is None:
            return all_to_all(self.lane, self.group, rows, send_counts, receive_counts, label, out)
        rows = rows.detach().contiguous()
        if out is None:
            out = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        leaving, arriving = rows.split(list(send_counts)), out.detach().split(list(receive_counts))

        def start() -> PairsWork:
            return pairs.exchange(leaving, arriving)

        return self.lane.launch(self.group, label, start, out, rows)


def gather(lane: Lane, group: Group, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
    """Every member's `value`, stacked in rank order: shape [P, *value.shape]."""
    return Ready(value.unsqueeze(0)) if group.size == 1 else _gather(lane, group, value, label)


def gather_to_host(lane: Lane, group: Group, value: torch.Tensor, label: str) -> InFlight[list[Any]]:
    """As `gather`, as a nested list."""
    if group.size == 1:
        return Then(Ready(value.unsqueeze(0)), torch.Tensor.tolist)
    return OnHost(_gather(lane, group, value, label))


def _gather(lane: Lane, group: Group, value: torch.Tensor, label: str) -> Transfer[torch.Tensor]:
    out = value.new_empty((group.size, *value.shape))
    if group.backend == "gloo":
        sent = value.expand(group.size, *value.shape).contiguous()
        call: Callable[..., Any] = dist.all_to_all_single
    else:
        sent, call = value.contiguous(), ALL_GATHER
    return lane.collective(group, label, partial(call, out, sent, group=group.handle), out, sent)


def poll(
    event: torch.cuda.Event,
    watch: Watch,
    label: str,
    ranks: tuple[int, ...],
    patience_s: float | None = None,
) -> None:
    """Wait on the host for an event, no longer than the deadline."""
    begun = time.monotonic()
    while not event.query():
        waited = time.monotonic() - begun
        if waited > (patience_s or watch.deadline_s):
            raise watch.explain(label, ranks, TimeoutError("timed out"))
        if waited > SPIN_S:
            time.sleep(SPIN_S / 10)


def _stamp_when_done(work: Waitable | None, stamps: TransferStamps) -> None:
    """Gloo finishes on its own thread: stamp there, because nobody may be waiting yet."""

    def done(_: object) -> None:
        if stamps.done is None:
            stamps.done = time.perf_counter_ns()

    assert work is not None
    try:
        future = work.get_future()
    except RuntimeError:  # gloo's sends and receives have none: whoever waits for them stamps
        return
    future.add_done_callback(done)
