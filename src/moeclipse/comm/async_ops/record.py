"""When a rank computed, waited and communicated, as its own annotations saw it.

A stamp is a host time on CPU and an event on CUDA; both become seconds on the host's monotonic clock
when the step is over, so nothing is synchronised while the step runs. Annotations, not kernel names,
say what is communication: every transfer we start is one, and nothing else is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from moeclipse.comm.async_ops.ledger import Ledger, Slices

Stamp = Any  # int nanoseconds on CPU, torch.cuda.Event on CUDA
Region = list[tuple[str, str, str] | tuple[str, Slices]]
"""What a captured region launches, lane, group and label of each; and exchanges that it announces before."""


@dataclass(kw_only=True)
class TransferStamps:
    """Of one transfer: `group` names the axis, so that its members can match their k-th transfers."""

    group: str
    label: str
    lane: str = ""
    launched: int
    begun: Stamp
    done: Stamp = None
    outlives: bool = False
    """The next step may begin before it is done."""

    @property
    def goes_on(self) -> bool:
        return self.outlives and not passed(self.done)


@dataclass(kw_only=True)
class StepStamps:
    """All of one step in seconds; transfers keep the order in which this rank launched them."""

    window: tuple[float, float]
    compute: list[tuple[float, float]]
    waits: list[tuple[float, float]]
    transfers: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(group, label, launched, done)"""
    lanes: list[str] = field(default_factory=list)
    """Of each transfer."""
    carried: list[tuple[str, float, float]] = field(default_factory=list)
    """(label, begun, done) of transfers of the step before that went on in this one."""
    named: list[tuple[str, float, float]] = field(default_factory=list)
    """Of a traced step: what computed when, the whole before its parts."""


def passed(stamp: Stamp) -> bool:
    return stamp is not None and (isinstance(stamp, int) or bool(stamp.query()))


class Recorder:
    """Collects the stamps of one step at a time; outside a step it costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.device = device.type == "cuda", device
        self.active = False
        self.ledger: Ledger | None = None
        """Checks that each launch is the next op of a program; left out: they pass by."""
        self._region: Region | None = None
        self.capturing = False
        """Inside what is captured, stamps would be parts of a graph."""
        self._origin: tuple[int, Stamp] = (0, None)
        self.marks: list[tuple[Any, Stamp, Stamp]] | None = None
        """What is computed, with a name each; None: the step is not traced, and names cost nothing."""
        self._compute: list[tuple[Stamp, Stamp]] = []
        self._waits: list[tuple[Stamp, Stamp]] = []
        self._transfers: list[TransferStamps] = []
        self._carried: list[TransferStamps] = []

    def stamp(self) -> Stamp:
        if not self.cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # finding out the device takes torch longer
        return event

    def begin_step(self) -> None:
        self._carried = [one for one in (*self._carried, *self._transfers) if one.goes_on]
        self._synchronize()
        self._origin = (time.perf_counter_ns(), self.stamp())
        self._compute, self._waits, self._transfers = [], [], []
        self.marks = None if self.marks is None else []
        self.active = True

    @property
    def step_so_far_s(self) -> float:
        """Of the host's clock, since the step began."""
        return 1e-9 * (time.perf_counter_ns() - self._origin[0])

    @contextmanager
    def compute(self, what: object = "compute") -> Iterator[None]:
        begun = self.stamp() if self.active else None
        yield
        if self.active and begun is not None:
            self._compute.append((begun, self.stamp()))
            if self.marks is not None:
                self.marks.append((what, *self._compute[-1]))

    def mark(self, what: object) -> AbstractContextManager[None]:
        """A part of compute that a trace shows by name; `what` is made a text when the step is over."""
        return self._marked(what) if self.tracing else nullcontext()

    @property
    def tracing(self) -> bool:
        return self.marks is not None and not self.capturing

    @contextmanager
    def _marked(self, what: object) -> Iterator[None]:
        begun = self.stamp()
        yield
        if self.marks is not None:
            self.marks.append((what, begun, self.stamp()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = self.stamp() if self.active else None
        yield
        if self.active and begun is not None:
            self._waits.append((begun, self.stamp()))

    def passes(self, lane: str, group: str, label: str) -> None:
        """Every transfer that is launched passes here, whatever carries it."""
        if self._region is not None:
            self._region.append((lane, group, label))
        if self.ledger is not None:
            self.ledger.launch(lane, group, label)

    def announce(self, where: str, slices: Slices) -> None:
        """The exchange of one call of a layer, for the ledger."""
        if self._region is not None:
            self._region.append((where, slices))
        elif self.ledger is not None:
            self.ledger.announce(where, slices)

    @contextmanager
    def region(self) -> Iterator[Region]:
        """What is launched inside, in order: where that is captured, it is launched again at every replay."""
        outer, self._region, self.capturing = self._region, [], True
        try:
            yield self._region
        finally:
            self._region, self.capturing = outer, outer is not None

    def replay(self, region: Region, captured: str = "", now: str = "") -> None:
        """A captured region is launched as one: what it lists passes as if each were launched by itself.

        `now`: what labels end with this time, where they ended with `captured`.
        """

        def renamed(label: str) -> str:
            return label.removesuffix(captured) + now if label.endswith(captured) else label

        for one in region:
            if len(one) == 2:
                where, slices = one
                labels = {kind: [renamed(label) for label in found] for kind, found in slices.items()}
                self.announce(renamed(where), labels)
            else:
                lane, group, label = one
                self.passes(lane, group, renamed(label))

    def apart(self, what: str) -> AbstractContextManager[None]:
        """Launches inside belong to no step."""
        return nullcontext() if self.ledger is None else self.ledger.apart(what)

    def launch(self, lane: str, group: str, label: str, *, outlives: bool = False) -> TransferStamps:
        self.passes(lane, group, label)
        now, begun = time.perf_counter_ns(), self.stamp()
        stamps = TransferStamps(
            group=group, label=label, lane=lane, launched=now, begun=begun, outlives=outlives
        )
        if self.active:
            self._transfers.append(stamps)
        return stamps

    def end_step(self) -> StepStamps:
        self.active = False
        end = self.stamp()
        self._synchronize()
        origin, last = self._origin[0] * 1e-9, self.seconds(end)

        def moment(stamp: Stamp) -> float:
            return self.seconds(stamp) if passed(stamp) else last

        transfers = [(one.group, one.label, moment(one.begun), moment(one.done)) for one in self._transfers]
        return StepStamps(
            window=(origin, last),
            compute=[(self.seconds(a), self.seconds(b)) for a, b in self._compute],
            waits=[(self.seconds(a), self.seconds(b)) for a, b in self._waits],
            transfers=transfers,
            lanes=[one.lane for one in self._transfers],
            carried=[(one.label, origin, moment(one.done)) for one in self._carried],
            named=self._named(),
        )

    def _synchronize(self) -> None:
        """With the device, but for transfers that may go on into the next step."""
        if not self.cuda:
            return
        everything = (*self._carried, *self._transfers)
        if not any(one.goes_on for one in everything):
            torch.cuda.synchronize()
            return
        torch.cuda.current_stream(self.device).synchronize()
        for one in everything:
            if not one.outlives and one.done is not None:
                one.done.synchronize()

    def _named(self) -> list[tuple[str, float, float]]:
        found = [(str(what), self.seconds(a), self.seconds(b)) for what, a, b in self.marks or ()]
        return sorted(found, key=lambda one: (one[1], -one[2]))

    def seconds(self, stamp: Stamp) -> float:
        """On the host's clock; of a stamp of the last step, after its end."""
        if not self.cuda or isinstance(stamp, int):
            return float(stamp * 1e-9)
        return float(self._origin[0] * 1e-9 + self._origin[1].elapsed_time(stamp) * 1e-3)
