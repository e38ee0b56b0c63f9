"""Kernels of a traced step, by torch's profiler, on the clock that the recorder reads.

The profiler has a clock of its own. The host's clock is read inside of some markers, which are among its
events: the shortest of them says what lies between both clocks, within its length. Kernels keep the name
under which the device ran them and the stream they ran on; what launched each is the slice above it in time,
on the row of compute.

Hazard: starting the profiler takes long the first time; that is before the step's window opens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from moeclipse.report.timeline import KERNEL
from moeclipse.train.observe.trace_file import Slice

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

MARKER, NUM_MARKERS = "moeclipse.clock", 5


class KernelTrace:
    """Between `start` and `stop`."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        self._marked_us: list[float] = []

    def start(self) -> None:
        self._profile.start()
        for number in range(NUM_MARKERS):  # the first ones take long
            with record_function(f"{MARKER} {number}"):
                self._marked_us.append(1e-3 * time.perf_counter_ns())

    def stop(self, wanted: Callable[[FunctionEvent], bool] | None = None) -> list[Slice]:
        """What ran on the device, in microseconds of the host's clock."""
        self._profile.stop()
        return aligned(self._profile.events() or (), self._marked_us, wanted or on_device)


def on_device(event: FunctionEvent) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CUDA)


def aligned(
    events: Iterable[FunctionEvent], marked_us: list[float], wanted: Callable[[FunctionEvent], bool]
) -> list[Slice]:
    """Those events that are wanted; none where markers were lost, since nobody would know when they ran."""
    events = list(events)
    markers = [event for event in events if event.name.startswith(MARKER) and not on_device(event)]
    if not markers:
        return []
    best = min(markers, key=size_of)
    away = marked_us[int(best.name.split()[-1])] - best.time_range.start
    return [
        Slice(
            f"stream {getattr(event, 'device_resource_id', 0)}",
            KERNEL,
            event.name,
            event.time_range.start + away,
            size_of(event),
        )
        for event in events
        if wanted(event) and not event.name.startswith(MARKER)
    ]


def size_of(event: FunctionEvent) -> float:
    return float(event.time_range.end - event.time_range.start)
