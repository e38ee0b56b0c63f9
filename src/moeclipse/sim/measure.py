"""Where the time of a simulated step goes, and how much memory is held when.

Every instant of every rank is one of four things: compute; exposed communication; straggle (a collective
was launched here, but a peer has not arrived); idle. They add up to the makespan, always. A receive that
was posted ahead of its sender is waiting on purpose: that wait is idle (the bubble), not straggle.
Hidden and exposed are also given per kind of communication; two kinds on different lanes may be exposed at
the same instant, so kinds may add up to more than the instants of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import COMPUTE, TRANSFERS, Kind, Part
from moeclipse.schedule.memory import memory_columns
from moeclipse.schedule.op import ActionColumns
from moeclipse.sim.engine import Floats, Simulation


@dataclass(frozen=True, kw_only=True)
class RankTime:
    compute: float
    exposed: float
    straggle: float
    idle: float
    local_bubble: float
    """Not computing between the rank's first and last compute op: what zero-bubble papers count."""

    @property
    def bubble(self) -> float:
        return self.exposed + self.straggle + self.idle


@dataclass(frozen=True, kw_only=True)
class KindTime:
    """Summed over ranks."""

    total: float
    hidden: float

    @property
    def exposed(self) -> float:
        return self.total - self.hidden


@dataclass(frozen=True, kw_only=True)
class Summary:
    makespan: float
    ranks: tuple[RankTime, ...]
    kinds: dict[Kind, KindTime]
    """Communication by kind."""
    peak: tuple[float, ...]
    """Most memory held at once on each rank, in simulated time."""

    @property
    def bubble(self) -> float:
        """Of the worst rank."""
        return max((rank.bubble for rank in self.ranks), default=0.0)

    @property
    def compute(self) -> float:
        return sum(rank.compute for rank in self.ranks)

    def communication(self, *parts: Part) -> KindTime:
        """All kinds together, or those of some parts."""
        chosen = [time for kind, time in self.kinds.items() if not parts or kind.part in parts]
        return KindTime(total=sum(t.total for t in chosen), hidden=sum(t.hidden for t in chosen))


@dataclass(frozen=True, kw_only=True)
class CommunicationTime:
    """Communication of one rank, as arrays."""

    ready: Floats
    start: Floats
    finish: Floats
    names: tuple[Kind, ...]
    """The kinds there are ..."""
    kind: np.ndarray
    """... and which of them each transfer is."""
    posted_ahead: np.ndarray

    @property
    def kinds(self) -> list[Kind]:
        return [self.names[index] for index in self.kind.tolist()]


def summarise(result: Simulation) -> Summary:
    makespan = result.makespan
    ranks, by_kind = [], dict[Kind, KindTime]()
    ends = TransferEnds(result)
    for rank in range(result.program.num_ranks):
        start, finish = compute_intervals(result, rank)
        lane = communication_time(result, rank, ends)
        ranks.append(_rank_time(makespan, start, finish, lane))
        overlap = _covered(start, finish, lane.finish) - _covered(start, finish, lane.start)
        total, hidden = (
            np.bincount(lane.kind, weights=spent, minlength=len(lane.names))
            for spent in (lane.finish - lane.start, overlap)
        )
        for index in np.unique(lane.kind).tolist():
            before = by_kind.get(lane.names[index], KindTime(total=0.0, hidden=0.0))
            by_kind[lane.names[index]] = KindTime(
                total=before.total + float(total[index]), hidden=before.hidden + float(hidden[index])
            )
    peak = tuple(
        float(memory_curve(result, rank)[1].max(initial=0.0)) for rank in range(result.program.num_ranks)
    )
    return Summary(makespan=makespan, ranks=tuple(ranks), kinds=by_kind, peak=peak)


def compute_intervals(result: Simulation, rank: int) -> tuple[Floats, Floats]:
    """Start and end of the rank's compute ops, in order."""
    part, ranks = result.rank_slice(rank), result.program.ranks
    if isinstance(ranks, ActionColumns):
        return result.start[part], result.finish[part]
    chosen = np.array([op.lane == COMPUTE for op in ranks[rank]], dtype=bool)
    return result.start[part][chosen], result.finish[part][chosen]


class TransferEnds:
    """Transfers that follow from the placement, by the rank at each end."""

    def __init__(self, result: Simulation) -> None:
        transfers = result.verified.graph.transfers
        self.sorted: list[tuple[np.ndarray, np.ndarray]] = []
        for ends in () if transfers is None else (transfers.source, transfers.destination):
            order = np.argsort(ends, kind="stable")
            bounds = np.searchsorted(ends[order], np.arange(result.program.num_ranks + 1))
            self.sorted.append((order, bounds))

    def of(self, rank: int) -> list[np.ndarray]:
        """Those that leave `rank`, and those that come to it; nothing where transfers stand in the lists."""
        return [order[bounds[rank] : bounds[rank + 1]] for order, bounds in self.sorted]


def communication_time(result: Simulation, rank: int, ends: TransferEnds | None = None) -> CommunicationTime:
    """Everything on the rank's communication lanes; both ends of a transfer count it.

    `ends`: made once for all ranks by whoever asks for all of them.
    """
    part, ranks = result.rank_slice(rank), result.program.ranks
    ops = () if isinstance(ranks, ActionColumns) else ranks[rank]
    chosen = np.array([op.lane != COMPUTE for op in ops], dtype=bool)
    inside = np.arange(part.start, part.stop)[: len(chosen)][chosen]
    sent = [op.kind for op in ops if op.lane != COMPUTE]
    names = (*TRANSFERS, *dict.fromkeys(kind for kind in sent if kind not in TRANSFERS))
    number = {kind: index for index, kind in enumerate(names)}
    nodes, kind = [inside], [np.array([number[k] for k in sent], dtype=np.int64)]
    transfers, num_ops = result.verified.graph.transfers, result.verified.graph.num_ops
    pairs = ((kinds.SEND_F, kinds.SEND_B), (kinds.RECV_F, kinds.RECV_B))
    for mine, (there, back) in zip((ends or TransferEnds(result)).of(rank), pairs, strict=False):
        assert transfers is not None
        nodes.append(num_ops + mine)
        kind.append(np.where(transfers.is_forward[mine], number[there], number[back]))
    at, which = np.concatenate(nodes), np.concatenate(kind)
    ahead = np.array([name.part is Part.RECV for name in names], dtype=bool)[which]
    return CommunicationTime(
        ready=result.ready[at],
        start=result.start[at],
        finish=result.finish[at],
        names=names,
        kind=which,
        posted_ahead=ahead,
    )


def _rank_time(makespan: float, start: Floats, finish: Floats, lane: CommunicationTime) -> RankTime:
    """Sweep over all moments at which something starts or ends."""
    moments = np.unique(np.concatenate([[0.0, makespan], start, finish, lane.ready, lane.start, lane.finish]))
    lengths = np.diff(moments)

    def busy(begin: Floats, end: Floats) -> np.ndarray:
        change = np.zeros(len(moments), dtype=np.int64)
        np.add.at(change, np.searchsorted(moments, begin), 1)
        np.add.at(change, np.searchsorted(moments, end), -1)
        return np.cumsum(change)[:-1] > 0

    computing = busy(start, finish)
    sending = busy(lane.start, lane.finish) & ~computing
    meets = ~lane.posted_ahead
    waiting = busy(lane.ready[meets], lane.start[meets]) & ~computing & ~sending
    idle = ~(computing | sending | waiting)
    spent = [float(lengths[mask].sum()) for mask in (computing, sending, waiting, idle)]
    span = float(finish.max() - start.min()) if len(start) else 0.0
    return RankTime(
        compute=spent[0], exposed=spent[1], straggle=spent[2], idle=spent[3], local_bubble=span - spent[0]
    )


def _covered(start: Floats, finish: Floats, at: Floats) -> Floats:
    """Compute time before each moment; compute ops of one rank never overlap."""
    if not len(start):
        return np.zeros_like(at)
    done = np.concatenate([[0.0], np.cumsum(finish - start)])
    index = np.searchsorted(start, at, side="right")
    current = np.clip(index - 1, 0, None)
    inside = np.where(index > 0, np.minimum(at, finish[current]) - start[current], 0.0)
    return done[current] * (index > 0) + inside


def memory_curve(result: Simulation, rank: int) -> tuple[Floats, Floats]:
    """(moments, memory held from each moment on): taken at an op's start, given back at its end."""
    part = result.rank_slice(rank)
    alloc, free = memory_columns(result.program, rank)
    moments = np.concatenate([result.start[part], result.finish[part]])
    change = np.concatenate([alloc, -free])
    order = np.lexsort((change, moments))  # at one instant, giving back comes first
    held = np.cumsum(change[order])
    keep = change[order] != 0
    return moments[order][keep], np.round(held[keep], 9)
