"""What the profiler saw, on the clock of the recorder; on CPU, ops of torch stand in for kernels."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.observe.kernel_trace import MARKER, KernelTrace, aligned, on_device, size_of

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def profiled(_: Mesh) -> list[float]:
    trace = KernelTrace()
    trace.start()
    time.sleep(0.05)
    before = time.perf_counter_ns()
    torch.mm(torch.ones(300, 300), torch.ones(300, 300))
    after = time.perf_counter_ns()
    seen: list[float] = []
    (found,) = trace.stop(lambda event: seen.append(size_of(event)) or event.name == "aten::mm")
    return [1e-3 * before, found.start, found.start + found.length, 1e-3 * after, max(seen)]


def test_clocks_agree_as_well_as_the_shortest_marker_says() -> None:
    """However busy the machine is: a marker that was held up is not the shortest."""
    before, start, end, after, longest = run_alone(profiled)
    assert before - longest < start < end < after + longest


def event(name: str, start: float, end: float, device: Any, stream: int = 7) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, device_resource_id=stream)


def test_kernels_keep_their_streams_and_move_to_our_clock() -> None:
    events = [event("gemm", 30, 45, CUDA), event("aten::mm", 28, 50, CPU), event(f"{MARKER} 0", 1, 9, CPU)]
    events += [event(f"{MARKER} 1", 10, 11, CPU), event(f"{MARKER} 0", 12, 12.5, CUDA)]
    (found,) = aligned(events, [500.0, 1000.0], on_device)
    assert (found.lane, found.name, found.kind) == ("stream 7", "gemm", "kernel")
    assert (found.start, found.length) == (pytest.approx(1020.0), pytest.approx(15.0))


def test_without_a_marker_nobody_knows_when() -> None:
    assert aligned([event("gemm", 30, 45, CUDA)], [1000.0], on_device) == []
