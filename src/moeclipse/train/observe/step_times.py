"""Where the time of a step went, on every rank.

    times = StepTimes(mesh)
    times.after(step, recorder.end_step(), rows)            # collective, after each step; nobody waits
    times.take()                                            # what is known by now of earlier steps

Compute, exposed communication, waiting for slower ranks, idle: of each rank and in the mean, from our own
annotations (`report/intervals`). A transfer counts from the moment its last member launched it.

One message a step, which is read when the next step has ended: when this rank launched what, by group, and
how the step before was split. So all ranks know of a step two steps later; `settle` waits for it at once,
where a run saves, traces or ends. On one rank nothing travels and nothing is late.

    counts of groups | split, rows and number of the step before | launches, group by group | unused

The message is as long as the longest list of launches that any rank had; a rank that has more says so, all
make room, and of that step nobody knows how late the launches were that had none.

A rank that computes longer than the others do, for many steps, is named: a throttled GPU, a busy neighbour.
Ranks are held against those that hold the same layers: a stage may well have more to do than another. A rank
whose experts are asked for more than others computes longer, too, and nothing is wrong with its machine: the
note says by how many rows. Every rank adds the same numbers and says the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch

from moeclipse.comm.async_ops.lane import InFlight, gather
from moeclipse.comm.async_ops.ledger import HOST_GROUP
from moeclipse.comm.async_ops.reading import send
from moeclipse.comm.async_ops.record import StepStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.core.steps import nth
from moeclipse.report.intervals import StepSplit, TransferInterval, split_step

TIMES = ("step", "compute", "exposed", "straggle", "idle", "comm")
TOLD = len(TIMES) + 2
"""Numbers of the step before: its split, rows and number; below 0: there is none."""
SPARE = 1.25
"""Room for more launches than any rank had."""
Named = dict[str, Any]
"""As `incidents.jsonl` keeps it: rank, step, what."""
SLOW = 1.25
"""Times the median of its peers."""
STEPS = 20
"""Slow ones before a rank is named, then twice as many, and so on; one that is not slow counts off two."""


class StepTold(NamedTuple):
    """What is known of a step, some steps later."""

    step: int
    times: dict[str, Any]
    """For its record: means, `ranks`, and `stragglers` where there are any."""


class Unsplit(NamedTuple):
    """A step whose launches are on their way to everyone."""

    step: int
    stamps: StepStamps
    rows: int


class StepTimes:
    def __init__(self, mesh: Mesh) -> None:
        """Collective: hosts have clocks of their own."""
        self.mesh = mesh
        self.clock_s, self.clock_error_s = mesh.clock_offset()
        self.stamps: StepStamps | None = None
        self.transfers: list[TransferInterval] = []
        """Both of the last step that is split."""
        self.stragglers = Stragglers(peers=mesh.partitions["dense_grads"])
        self._message: InFlight[torch.Tensor] | None = None
        self._sent: Unsplit | None = None
        self._split: tuple[int, list[float]] | None = None
        """(step, its times and rows) of this rank, which the others do not know yet."""
        self._room = 0
        self._told: list[StepTold] = []

    def after(self, step: int, stamps: StepStamps, rows: int) -> float:
        """`rows` are those that the experts of this rank computed. Collective; does not wait.

        Returns the milliseconds that the step took on this rank.
        """
        step_ms = 1e3 * (stamps.window[1] - stamps.window[0])
        with self.mesh.recorder.apart("times of a step"):
            self._hear()
            self._sent = Unsplit(step, stamps, rows)
            by_group = launches_of(stamps, self.clock_s)
            if self.mesh.world.size == 1:
                self._take_split(by_group)
                self._tell_split()
                return step_ms
            launches = [by_group[group.name] for group in self.mesh.groups]
            number, told = (-1, [0.0] * (TOLD - 1)) if self._split is None else self._split
            self._split = None
            flat = [at for group in launches for at in group]
            if not self._room:  # the first step of all ranks: they agree on a length
                longest = torch.tensor([len(flat)], dtype=torch.float64, device=self.mesh.device)
                self._make_room(gather(self.mesh.grads, self.mesh.world, longest, "launches").get())
            mine = [*(float(len(group)) for group in launches), *told, float(number)]
            mine += (flat + [0.0] * self._room)[: self._room]
            tensor = send(torch.tensor(mine, dtype=torch.float64), self.mesh.device)
            self._message = gather(self.mesh.grads, self.mesh.world, tensor, "exchange of step times")
        return step_ms

    def take(self) -> list[StepTold]:
        """What has become known since this was asked."""
        told, self._told = self._told, []
        return told

    def settle(self) -> None:
        """All steps so far, now: waits for the others. Collective."""
        if self.mesh.world.size == 1:
            return
        with self.mesh.recorder.apart("times of a step"):
            self._hear()
            self._tell_split()

    def _hear(self) -> None:
        """The message of the step before: everyone has sent it a step ago."""
        if self._message is None:
            return
        table, self._message = self._message.get().tolist(), None
        groups = len(self.mesh.groups)
        of_before = [row[groups : groups + TOLD] for row in table]
        if of_before[0][-1] >= 0:
            self._tell(int(of_before[0][-1]), [row[:-1] for row in of_before])
        found: dict[str, list[float]] = {}
        for number, group in enumerate(self.mesh.groups):
            members = [table[rank] for rank in group.ranks]
            lists = [launched(row, groups, number) for row in members]
            # Of what had no room nobody knows when the others launched it.
            found[group.name] = [max(moments) for moments in zip(*lists, strict=False)]
        self._take_split(found)
        longest = max(sum(row[:groups]) for row in table)
        if longest > self._room:
            self._make_room(torch.tensor([longest]))

    def _make_room(self, lengths: torch.Tensor) -> None:
        self._room = int(SPARE * float(lengths.max())) + 1

    def _take_split(self, last: dict[str, list[float]]) -> None:
        assert self._sent is not None
        step, stamps, rows = self._sent
        self.stamps, self.transfers = stamps, with_last_launches(stamps, last, self.clock_s)
        split = split_by(stamps, self.transfers)
        self._split = (step, [*(1e3 * getattr(split, name) for name in TIMES), float(rows)])
        self._sent = None

    def _tell_split(self) -> None:
        if self._split is None:
            return
        (step, mine), self._split = self._split, None
        if self.mesh.world.size == 1:
            self._tell(step, [mine])
        else:
            told = send(torch.tensor(mine, dtype=torch.float64), self.mesh.device)
            self._tell(step, gather(self.mesh.grads, self.mesh.world, told, "step times").get().tolist())

    def _tell(self, step: int, table: Sequence[Sequence[float]]) -> None:
        per_rank = table_of(table)
        slow = self.stragglers.add(step, per_rank["compute_ms"], per_rank.get("rows"))
        times = {**mean_times(per_rank), "ranks": per_rank, **({"stragglers": slow} if slow else {})}
        self._told.append(StepTold(step, times))


def launches_of(stamps: StepStamps, clock_s: float) -> dict[str, list[float]]:
    """By groups, whose members launch the same transfers in the same order; of others there are none."""
    found: dict[str, list[float]] = defaultdict(list)
    for group_name, _, at, _ in stamps.transfers:
        found[group_name].append(at + clock_s)
    return found


def launched(row: Sequence[float], groups: int, number: int) -> Sequence[float]:
    """Of one rank's message: the launches of the group of this number, as far as there was room."""
    first = groups + TOLD + int(sum(row[:number]))
    return row[first : first + int(row[number])]


def split_of(stamps: StepStamps, mesh: Mesh, clock_s: float = 0.0) -> StepSplit:
    """This rank's step, after asking its peers when they launched each transfer.

    Hosts have clocks of their own: `clock_s` leads from this rank's to the one that all of them speak in.
    """
    return split_by(stamps, transfers_of(stamps, mesh, clock_s))


def split_by(stamps: StepStamps, transfers: list[TransferInterval]) -> StepSplit:
    carried = [
        TransferInterval(label=label, launched=begun, last_launched=begun, done=done)
        for label, begun, done in stamps.carried
    ]
    transfers = [*carried, *transfers]
    return split_step(stamps.window, compute=stamps.compute, waits=stamps.waits, transfers=transfers)


def transfers_of(stamps: StepStamps, mesh: Mesh, clock_s: float = 0.0) -> list[TransferInterval]:
    """All transfers of a step, with the moment when the last member of each launched it. Collective."""
    last: dict[str, list[float]] = {}
    by_group = launches_of(stamps, clock_s)
    for group in mesh.groups:
        if mine := by_group[group.name]:
            tensor = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
            everyone = gather(mesh.grads, group, tensor, "exchange of launch times").get()
            last[group.name] = everyone.max(0).values.tolist()
    return with_last_launches(stamps, last, clock_s)


def with_last_launches(
    stamps: StepStamps, last: dict[str, list[float]], clock_s: float = 0.0
) -> list[TransferInterval]:
    """`last`: by group, when the last member launched its transfers, in their order."""
    counted: dict[str, int] = defaultdict(int)
    transfers = []
    for group_name, label, at, done in stamps.transfers:
        number = counted[group_name]
        counted[group_name] += 1
        if group_name == HOST_GROUP:  # nobody else takes part
            latest = at
        elif group_name not in last:  # between stages: who waits there waits for the other stage's compute
            latest = done
        elif number < len(last[group_name]):
            latest = last[group_name][number] - clock_s
        else:
            latest = at
        transfers.append(TransferInterval(label=label, launched=at, last_launched=latest, done=done))
    return transfers


def gather_splits(split: StepSplit, mesh: Mesh, rows: int = 0) -> dict[str, list[float]]:
    """Of every rank: {"compute_ms": [rank 0, rank 1, ...], ...}; of several the rows of experts, too."""
    mine = [*(1e3 * getattr(split, name) for name in TIMES), float(rows)]
    told = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
    return table_of(gather(mesh.grads, mesh.world, told, "exchange of step times").get().tolist())


def table_of(table: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """`table`: of each rank its times in milliseconds, and rows."""
    times = {f"{name}_ms": [row[i] for row in table] for i, name in enumerate(TIMES)}
    return {**times, "rows": [int(row[len(TIMES)]) for row in table]} if len(table) > 1 else times


def mean_times(per_rank: dict[str, list[float]]) -> dict[str, float]:
    """Over ranks, with hidden time and its share of communication."""
    times = {name: values for name, values in per_rank.items() if name.endswith("_ms")}
    means = {name: sum(values) / len(values) for name, values in times.items()}
    hidden = means["comm_ms"] - means["exposed_ms"]
    share = hidden / means["comm_ms"] if means["comm_ms"] > 0 else 0.0
    return means | {"hidden_ms": hidden, "hidden_fraction": share}


@dataclass(kw_only=True)
class Stragglers:
    peers: Sequence[Sequence[int]]
    """Ranks with the same layers."""
    _slow_for: dict[int, int] = field(default_factory=dict)
    _told_at: dict[int, int] = field(default_factory=dict)

    def add(self, step: int, compute_ms: Sequence[float], rows: Sequence[float] | None = None) -> list[Named]:
        """Who there is to name after a step; `rows` are those that the experts of each rank computed."""
        return [named for ranks in self.peers for named in self._among(ranks, step, compute_ms, rows)]

    def _among(
        self, ranks: Sequence[int], step: int, compute_ms: Sequence[float], rows: Sequence[float] | None
    ) -> Iterator[Named]:
        for rank in ranks:
            others = [other for other in ranks if other != rank]
            if not others:
                continue
            usual = median(compute_ms[other] for other in others)
            before = self._slow_for.get(rank, 0)
            slow = compute_ms[rank] > SLOW * usual > 0
            self._slow_for[rank] = before + 1 if slow else max(before - 2, 0)
            if not self._slow_for[rank]:
                self._told_at.pop(rank, None)
            if slow and self._slow_for[rank] >= self._told_at.get(rank, STEPS):
                self._told_at[rank] = 2 * self._slow_for[rank]
                text = (
                    f"step {nth(step)}: rank {rank} computes {compute_ms[rank] / usual:.2f} times as long as "
                    f"the others ({compute_ms[rank]:.0f} ms against {usual:.0f}), and has for "
                    f"{self._slow_for[rank]} steps: {_why(rank, others, rows)}"
                )
                yield {"rank": rank, "step": step, "what": text}


def _why(rank: int, others: Sequence[int], rows: Sequence[float] | None) -> str:
    usual = median(rows[other] for other in others) if rows else 0
    if rows and rows[rank] > 1.1 * usual:
        share = f"{rows[rank] / usual:.2f} times the rows of the others" if usual else "all rows"
        return f"its experts have {share}; placement.planner = 'incremental' would spread them"
    return "its experts have no more rows than the others, so look at its machine (clocks, heat, neighbours)"
