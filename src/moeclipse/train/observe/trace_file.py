"""`trace.json`: the traced steps of all ranks in Perfetto's format, and the same program as simulated.

One process for each rank, with a row for compute and one for each lane; behind them (process numbers from
SIMULATED on) one for each rank of the pipeline, as the simulator has it. Its ops cost what their sizes say
(`sim/step_costs`), and all of compute, and all of communication, as long as it was measured to take: so what
differs between both is the order of things and not the speed of the machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import MoEclipseError
from moeclipse.core.shown import say
from moeclipse.cost.hardware import device, link
from moeclipse.model.flops import device_of
from moeclipse.report.run import TRACE
from moeclipse.report.timeline import COMPUTE, SIMULATED, TRANSFER
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.sim.engine import simulate
from moeclipse.sim.step_costs import StepCosts
from moeclipse.sim.trace import perfetto
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.step_sizes import step_work, value_bytes
from moeclipse.train.run.run_files import write_atomic

MOST_SIMULATED = 100_000
"""Ops of a program that is simulated beside."""
PARTS = ("hidden_us", "exposed_us", "late_us")


class Slice(NamedTuple):
    """Start and length in microseconds; of transfers also PARTS."""

    lane: str
    kind: str
    name: str
    start: float
    length: float
    parts: tuple[float, ...] = ()

    def moved(self, by: float) -> Slice:
        return self._replace(start=self.start + by)


class RankTable(TypedDict):
    """A `RankTrace` as JSON, with every name once."""

    step: int
    begin_s: float
    clock_error_s: float
    compute_s: float
    moving_s: float
    left_out: int
    names: list[str]
    slices: list[Any]
    """Of each a row, its parts at the end; numbers of names."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """A step of one rank; `begin_s` is on the clock of all ranks."""

    step: int
    begin_s: float
    clock_error_s: float = 0.0
    compute_s: float = 0.0
    moving_s: float = 0.0
    slices: list[Slice]
    left_out: int = 0

    def told(self) -> RankTable:
        names: dict[str, int] = {}
        rows = [
            [one.lane, one.kind, names.setdefault(one.name, len(names)), *(round(n, 2) for n in one[3:5])]
            + [round(part, 2) for part in one.parts]
            for one in self.slices
        ]
        told = {key: value for key, value in vars(self).items() if key != "slices"}
        return cast(RankTable, {**told, "names": list(names), "slices": rows})

    @classmethod
    def read(cls, told: RankTable) -> RankTrace:
        names, fields = told["names"], cast(dict[str, Any], {**told})
        del fields["names"]
        rows = told["slices"]
        slices = [
            Slice(lane, kind, names[name], start, size, tuple(parts))
            for lane, kind, name, start, size, *parts in rows
        ]
        return cls(**{**fields, "slices": slices})


def write_trace(
    directory: Path, config: TrainConfig, mesh: Mesh, told: list[list[RankTable]], verified: Verified
) -> None:
    """Of all ranks, in rank order; a disk that is full costs the trace and not the run."""
    ranks = [[RankTrace.read(one) for one in steps] for steps in told]
    events = [event for rank, steps in enumerate(ranks) for event in measured_events(rank, steps, ranks)]
    beside, what = simulated_events(config, mesh, verified, [steps[0] for steps in ranks])
    other = {
        "steps": [one.step for one in ranks[0]],
        "ranks": len(ranks),
        "left_out": sum(one.left_out for steps in ranks for one in steps),
        "clock_error_ms": 1e3 * max(one.clock_error_s for steps in ranks for one in steps),
        "simulated": what,
    }
    text = json.dumps({"traceEvents": events + beside, "displayTimeUnit": "ms", "otherData": other})
    try:
        write_atomic(directory / TRACE, text)
    except OSError as error:
        say(f"{TRACE} cannot be written: {error.strerror or error}; training goes on without")


def measured_events(
    rank: int, steps: list[RankTrace], ranks: list[list[RankTrace]]
) -> list[dict[str, object]]:
    """Microseconds since rank 0 began the first traced step."""
    zero, lanes = ranks[0][0].begin_s, {"compute": 0}
    events: list[dict[str, Any]] = []
    for turn, one in enumerate(steps):
        begin = 1e6 * (one.begin_s - zero)
        for part in one.slices:
            row = lanes.setdefault(part.lane, len(lanes))
            told = {"turn": turn, **dict(zip(PARTS, part.parts, strict=False))}
            place = {"pid": rank, "tid": row, "ts": round(begin + part.start, 2), "dur": part.length}
            events.append({"ph": "X", "cat": part.kind, "name": part.name, **place, "args": told})
    return [*names_of(rank, f"rank {rank}", rank, lanes), *events]


def names_of(process: int, name: str, order: int, lanes: dict[str, int]) -> list[dict[str, object]]:
    told = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": order})]
    told += [("thread_name", row, {"name": lane}) for lane, row in lanes.items()]
    return [{"ph": "M", "name": what, "pid": process, "tid": row, "args": args} for what, row, args in told]


def simulated_events(
    config: TrainConfig, mesh: Mesh, verified: Verified, first: list[RankTrace]
) -> tuple[list[dict[str, object]], str]:
    """The first traced step as simulated, and in words what that was told; no events where it cannot be."""
    program = verified.program
    num_ops = sum(map(len, program.ranks))
    if num_ops > MOST_SIMULATED:
        return [], f"not simulated: the program has {num_ops} ops"
    cuda = mesh.device.type == "cuda"
    known = device_of(torch.cuda.get_device_name(mesh.device)) if cuda else None
    hardware = known or device("h200" if cuda else "cpu")
    width = value_bytes(config.model.dtype, hardware)
    work = step_work(config, mesh.dp, mesh.ep, width)
    costs = StepCosts(work, hardware, link("nvlink4" if cuda else "loopback"))
    try:
        durations = as_measured(verified, costs.durations(program), first)
        # Launches of the host are in what was measured.
        result = simulate(verified, replace(costs.costs(), launch=0.0), durations)
    except MoEclipseError as error:
        return [], f"not simulated: {error}"
    events = perfetto(result)["traceEvents"]
    for event in events:
        rank, event["pid"] = event["pid"], SIMULATED + event["pid"]
        if event["ph"] == "X":
            event["cat"] = COMPUTE if event["tid"] == 0 else TRANSFER
        elif event["name"] == "process_name":
            event["args"] = {"name": f"simulated, rank {rank} of the pipeline"}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": SIMULATED + rank}
    told = "simulated with the measured sums of compute and of communication, shared out by the sizes of ops"
    return events, told


def as_measured(
    verified: Verified, durations: list[list[float]], first: list[RankTrace]
) -> list[list[float]]:
    """Durations whose sums, over ops of compute and over transfers, are those that ranks have measured."""
    pairs = [
        (op.lane == kinds.COMPUTE, seconds)
        for ops, row in zip(verified.program.ranks, durations, strict=True)
        for op, seconds in zip(ops, row, strict=True)
    ]
    places, count = len(verified.program.ranks), len(first)
    scale = {}
    for computes, measured in (
        (True, sum(one.compute_s for one in first) / count),
        (False, sum(one.moving_s for one in first) / count),
    ):
        estimated = sum(seconds for kind, seconds in pairs if kind is computes) / places
        scale[computes] = measured / estimated if estimated > 0 else 1.0
    return [
        [seconds * scale[op.lane == kinds.COMPUTE] for op, seconds in zip(ops, row, strict=True)]
        for ops, row in zip(verified.program.ranks, durations, strict=True)
    ]
