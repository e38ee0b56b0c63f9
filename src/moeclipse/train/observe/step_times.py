"""Where the time of a step went, on every rank.

    times = StepTimes(mesh)
    record |= times.of(step, recorder.end_step(), rows)     # collective, after each step

Compute, exposed communication, waiting for slower ranks, idle: of each rank and in the mean, from our own
annotations (`report/intervals`). A transfer counts from the moment its last member launched it; who launched
when is exchanged after the step, outside its window.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from moeclipse.comm.async_ops.exchange import gather
from moeclipse.comm.async_ops.ledger import HOST_GROUP
from moeclipse.comm.async_ops.record import StepStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.report.intervals import StepSplit, TransferInterval, split_step
from moeclipse.train.step.stragglers import Stragglers

TIMES = ("step", "compute", "exposed", "straggle", "idle", "comm")


class StepTimes:
    def __init__(self, mesh: Mesh) -> None:
        """Collective: hosts have clocks of their own."""
        self.mesh = mesh
        self.clock_s, self.clock_error_s = mesh.clock_offset()
        self.stamps: StepStamps | None = None
        self.transfers: list[TransferInterval] = []
        """Both of the last step."""
        self.stragglers = Stragglers(peers=mesh.partitions["dense_grads"])

    def of(self, step: int, stamps: StepStamps, rows: int) -> dict[str, Any]:
        """For the record of a step; `rows` are those that the experts of this rank computed."""
        with self.mesh.recorder.apart("times of a step"):
            self.stamps, self.transfers = stamps, transfers_of(stamps, self.mesh, self.clock_s)
            per_rank = gather_splits(split_by(stamps, self.transfers), self.mesh, rows)
        slow = self.stragglers.add(step, per_rank["compute_ms"], per_rank.get("rows"))
        return {**mean_times(per_rank), "ranks": per_rank, **({"stragglers": slow} if slow else {})}


def split_of(stamps: StepStamps, mesh: Mesh, clock_s: float = 0.0) -> StepSplit:
    """This rank's step, after asking its peers when they launched each transfer.

    Hosts have clocks of their own: `clock_s` leads from this rank's to the one that all of them speak in.
    """
    return split_by(stamps, transfers_of(stamps, mesh, clock_s))


def split_by(stamps: StepStamps, transfers: list[TransferInterval]) -> StepSplit:
    return split_step(stamps.window, compute=stamps.compute, waits=stamps.waits, transfers=transfers)


def transfers_of(stamps: StepStamps, mesh: Mesh, clock_s: float = 0.0) -> list[TransferInterval]:
    """All transfers of a step, with the moment when the last member of each launched it. Collective."""
    launches: dict[str, list[float]] = defaultdict(list)
    for group_name, _, launched, _ in stamps.transfers:
        launches[group_name].append(launched + clock_s)
    last: dict[str, list[float]] = {}
    for group in mesh.groups:
        mine = launches.get(group.name)
        if mine:  # all members launched the same transfers in the same order
            tensor = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
            everyone = gather(mesh.grads, group, tensor, "exchange of launch times").get()
            last[group.name] = everyone.max(0).values.tolist()
    counted: dict[str, int] = defaultdict(int)
    transfers = []
    for group_name, label, launched, done in stamps.transfers:
        if group_name == HOST_GROUP:
            transfers.append(
                TransferInterval(label=label, launched=launched, last_launched=launched, done=done)
            )
            continue
        if group_name not in last:  # between stages: who waits there waits for the other stage's compute
            transfers.append(TransferInterval(label=label, launched=launched, last_launched=done, done=done))
            continue
        latest = last[group_name][counted[group_name]] - clock_s
        counted[group_name] += 1
        transfers.append(TransferInterval(label=label, launched=launched, last_launched=latest, done=done))
    return transfers


def gather_splits(split: StepSplit, mesh: Mesh, rows: int = 0) -> dict[str, list[float]]:
    """Of every rank: {"compute_ms": [rank 0, rank 1, ...], ...}; of several the rows of experts, too."""
    mine = [1e3 * getattr(split, name) for name in TIMES]
    if mesh.world.size == 1:
        return {f"{name}_ms": [time] for name, time in zip(TIMES, mine, strict=True)}
    told = torch.tensor([*mine, rows], dtype=torch.float64, device=mesh.device)
    table = gather(mesh.grads, mesh.world, told, "exchange of step times").get().tolist()
    times = {f"{name}_ms": [row[i] for row in table] for i, name in enumerate(TIMES)}
    return {**times, "rows": [int(row[-1]) for row in table]}


def mean_times(per_rank: dict[str, list[float]]) -> dict[str, float]:
    """Over ranks, with hidden time and its share of communication."""
    times = {name: values for name, values in per_rank.items() if name.endswith("_ms")}
    means = {name: sum(values) / len(values) for name, values in times.items()}
    hidden = means["comm_ms"] - means["exposed_ms"]
    share = hidden / means["comm_ms"] if means["comm_ms"] > 0 else 0.0
    return means | {"hidden_ms": hidden, "hidden_fraction": share}
