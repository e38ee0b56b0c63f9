"""Some steps of all ranks as a trace: what each computed, what travelled meanwhile, on one clock.

    trace = StepTrace(config, mesh, model)                # metrics.trace = 3: steps 3, 4 and 5
    trace.begin(step)                                     # before every step
    trace.end(step, times, directory, program)            # after it. Collective

After the last of its steps rank 0 writes RUN/trace.json. A traced step has names for what the recorder times
anyway (`comm/async_ops/record`): ops of programs, and the layers of a model that autograd runs. On CUDA the
profiler adds kernels (`train/observe/kernel_trace`). Beside the measured ranks stands the same program as the
simulator has it (`train/observe/trace_file`).

Contract. Other steps pay one comparison. What is kept is bounded: MOST_SLICES over all ranks and steps; how
many were left out is in the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.mesh import Mesh
from moeclipse.report.intervals import Span, TransferInterval, length, subtract, union
from moeclipse.report.timeline import COMPUTE, TRANSFER, WAIT
from moeclipse.schedule.check import Verified
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.kernel_trace import KernelTrace
from moeclipse.train.observe.step_times import StepTimes
from moeclipse.train.observe.trace_file import RankTrace, Slice, write_trace

TRACED = 3
MOST_SLICES = 150_000


class StepTrace:
    """Of one rank."""

    def __init__(self, config: TrainConfig, mesh: Mesh, model: nn.Module) -> None:
        self.config, self.mesh, self.model = config, mesh, model
        self.steps = config.metrics.traced(config.run.steps, TRACED)
        self._found: dict[int, RankTrace] = {}
        self._hooks: list[Any] = []
        self._kernels: KernelTrace | None = None

    def begin(self, step: int) -> None:
        if self.mesh.recorder.marks is not None:
            self._release()  # a step has failed, and the run went back
        if step not in self.steps:
            return
        recorder = self.mesh.recorder
        recorder.marks = []
        layers = getattr(self.model, "layers", None)
        if isinstance(layers, nn.ModuleDict):
            for name, layer in layers.items():
                self._hooks += watch_layer(name, layer, recorder)
        if recorder.cuda:
            self._kernels = KernelTrace()
            self._kernels.start()

    def _release(self) -> list[Slice]:
        """Nothing is named any more; the kernels that ran."""
        for hook in self._hooks:
            hook.remove()
        kernels = [] if self._kernels is None else self._kernels.stop()
        self._hooks, self._kernels, self.mesh.recorder.marks = [], None, None
        return kernels

    def end(self, step: int, times: StepTimes, directory: Path, program: Callable[[], Verified]) -> None:
        if step not in self.steps:
            return
        kernels = self._release()
        times.settle()
        most = MOST_SLICES // (self.mesh.num_ranks * len(self.steps))
        self._found[step] = rank_trace(step, times, kernels, most)
        if step == self.steps[-1]:
            self._write(directory, program)

    def _write(self, directory: Path, program: Callable[[], Verified]) -> None:
        """Ranks wait for the file, so that no step does."""
        mine = [self._found[step].told() for step in sorted(self._found)]
        self._found = {}
        with self.mesh.recorder.apart("trace of steps"):
            everyone = self.mesh.gather_objects(mine)
            if self.mesh.rank == 0:
                write_trace(directory, self.config, self.mesh, everyone, program())
            self.mesh.barrier()


def watch_layer(name: str, layer: nn.Module, recorder: Recorder) -> list[object]:
    """Hooks that mark forward and backward of a layer which autograd runs; pipelines call its parts instead.

    A gradient that arrives begins or ends a backward: of the output this layer's, of the input it ends it.
    """
    begun: dict[str, Any] = {}

    def before(_: nn.Module, given: tuple[object, ...]) -> None:
        if recorder.tracing:
            begun["F"] = recorder.stamp()
            if given and isinstance(given[0], torch.Tensor) and given[0].requires_grad:
                given[0].register_hook(lambda _: ended("B"))

    def after(_: nn.Module, __: tuple[object, ...], out: object) -> None:
        ended("F")
        first = out[0] if isinstance(out, tuple) else out
        if recorder.tracing and isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(lambda _: begun.update(B=recorder.stamp()) if recorder.tracing else None)

    def ended(way: str) -> None:
        start = begun.pop(way, None)
        if start is not None and recorder.tracing and recorder.marks is not None:
            recorder.marks.append((f"layer {name} {way}", start, recorder.stamp()))

    return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]


def rank_trace(step: int, times: StepTimes, kernels: list[Slice], most: int) -> RankTrace:
    """One rank's step, in microseconds from its own begin; the longest slices where there are too many."""
    stamps = times.stamps
    assert stamps is not None, "a step ends before it is traced"
    begin = stamps.window[0]

    def at(lane: str, kind: str, name: str, span: Span, parts: tuple[float, ...] = ()) -> Slice:
        return Slice(lane, kind, name, 1e6 * (span[0] - begin), 1e6 * (span[1] - span[0]), parts)

    found = [at("compute", COMPUTE, name, (a, b)) for name, a, b in stamps.named]
    found += [at("compute", WAIT, "wait", span) for span in stamps.waits]
    computing = subtract(stamps.compute, stamps.waits)
    free: dict[str, float] = {}
    for one, lane in zip(times.transfers, stamps.lanes, strict=True):
        # A lane is a FIFO: what was launched behind another transfer begins to travel when that is done.
        start = max(one.launched, free.get(lane, one.launched))
        free[lane] = max(one.done, free.get(lane, one.done))
        parts = tuple(1e6 * part for part in parts_of(one, computing))
        found.append(at(lane, TRANSFER, one.label, (min(start, one.done), one.done), parts))
    found += [one.moved(-1e6 * begin) for one in kernels]
    kept = sorted(found, key=lambda one: -one.length)[:most]
    return RankTrace(
        step=step,
        begin_s=begin + times.clock_s,
        clock_error_s=times.clock_error_s,
        compute_s=length(computing),
        moving_s=sum(one.done - max(one.launched, one.last_launched) for one in times.transfers),
        slices=sorted(kept, key=lambda one: (one.start, -one.length)),
        left_out=len(found) - len(kept),
    )


def parts_of(transfer: TransferInterval, computing: list[Span]) -> tuple[float, float, float]:
    """(hidden, exposed, waited for its last member) of one transfer, in seconds; `computing` is disjoint."""
    start, done = max(transfer.launched, transfer.last_launched), transfer.done
    first = max(bisect_right(computing, (start, start)) - 1, 0)
    last = bisect_right(computing, (done, done))
    moving = union([(start, done)])
    exposed = length(subtract(moving, computing[first:last]))
    return length(moving) - exposed, exposed, max(min(transfer.last_launched, done) - transfer.launched, 0.0)
