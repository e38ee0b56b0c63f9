"""What the simulator says about a program, from op times measured without overlap (see fb_overlap.py).

Calibrated on two runs of `off`, one with whole microbatches and one with halves: an op of a microbatch that
is cut takes what it took in halves. Exchanges on a core cost processor time, so compute is slower by as much
while one is under way; and between ops the host does things that are nobody's op.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from moeclipse.comm.mesh import Mesh
from moeclipse.cost.model import Costs
from moeclipse.pipeline.runtime import cuts_of
from moeclipse.report.intervals import clip, length, split_step, subtract
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.schedule.kinds import A2A, COMPUTE
from moeclipse.schedule.op import Op
from moeclipse.sim.engine import simulate

LABELS = {
    "dispatch S": "DISPATCH_F",
    "combine R": "COMBINE_F",
    "backward dispatch S": "COMBINE_B",
    "backward combine R": "DISPATCH_B",
}


def op_seconds(found: dict[str, Any]) -> dict[str, list[float]]:
    """Of each kind, by its name: compute without waits, and exchanges from the last launch to their end.

    ROUTE is told with its wait for the sizes, which the host cannot avoid.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    waits = found["waits"]
    for op, begun, ended in found["spans"]:
        if op.kind is kinds.ROUTE_F:
            seconds[op.kind.name].append(ended - begun)
        elif op.lane == COMPUTE:
            seconds[op.kind.name].append(length(subtract([(begun, ended)], clip(waits, (begun, ended)))))
    for transfer in found["transfers"]:
        for start, kind in LABELS.items():
            if transfer.label.startswith(start):
                seconds[kind].append(transfer.done - max(transfer.launched, transfer.last_launched))
    return dict(seconds)


def wire_share(found: dict[str, Any]) -> float:
    """What part of a core the exchanges of a step take while they are under way."""
    spans = {"compute": found["compute"], "waits": found["waits"], "transfers": found["transfers"]}
    whole = split_step(found["window"], **spans)
    return (found["busy"] - whole.compute) / whole.comm if whole.comm else 0.0


def mean_seconds(mesh: Mesh, found: list[dict[str, list[float]]]) -> dict[str, float]:
    """Means over repeats and ranks; of sizes, who comes last waits for the wire alone."""
    every: dict[str, list[float]] = defaultdict(list)
    for repeat in found:
        for kind, values in repeat.items():
            every[kind] += values
    everyone = mesh.gather_objects(every)
    seconds = {}
    for kind in sorted({kind for rank in everyone for kind in rank}):
        told = [rank[kind] for rank in everyone if kind in rank]
        if kind == "ROUTE_F" and mesh.pp == 1:
            told = [[min(both) for both in zip(*told, strict=True)]]
        seconds[kind] = statistics.mean(value for values in told for value in values)
    return seconds


class Prediction:
    """Op times of whole microbatches and of halves, and what the host does in between."""

    def __init__(self, mesh: Mesh, whole: list[Any], halves: list[Any], off: Verified, off_s: float) -> None:
        """`whole`, `halves`: steps of `off`; `off_s`: seconds of one of them, less straggle."""
        self.on_cores = mesh.device.type == "cpu"
        self.whole = mean_seconds(mesh, [op_seconds(found) for found in whole])
        self.half = mean_seconds(mesh, [op_seconds(found) for found in halves])
        shares = mesh.gather_objects(statistics.median(wire_share(found) for found in whole))
        self.share = statistics.mean(shares) if self.on_cores else 0.0
        self.between = 0.0
        missing = off_s - self.seconds(off)
        self.between = max(missing, 0.0) / max(sum(op.lane == COMPUTE for op in off.program.ranks[0]), 1)

    def seconds(self, verified: Verified) -> float:
        cuts = cuts_of(verified)
        durations = [[self._of(op, cuts) for op in ops] for ops in verified.program.ranks]
        slower = {("compute", "a2a"): min(max(1 - self.share, 0.1), 1.0)}
        costs = Costs(name="measured", seconds={}, inline_compute=self.on_cores, contention=slower)
        return simulate(verified, costs, durations).makespan

    def _of(self, op: Op, cuts: dict[int, int]) -> float:
        if op.lane not in (COMPUTE, A2A):
            return 0.0
        between = self.between if op.lane == COMPUTE else 0.0
        if op.microbatch not in cuts:
            return self.whole.get(op.kind.name, 0.0) + between
        passes = 1 if op.chunk is not None else cuts[op.microbatch]
        return passes * self.half.get(op.kind.name, 0.0) + between
