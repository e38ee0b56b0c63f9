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
from moeclipse.schedule.kinds import COMPUTE, Kind, Part
from moeclipse.schedule.op import Op
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
    kinds: list[Kind]
    posted_ahead: np.ndarray


def summarise(result: Simulation) -> Summary:
    makespan = result.makespan
    ranks, by_kind = [], dict[Kind, KindTime]()
    for rank in range(result.program.num_ranks):
        start, finish = compute_intervals(result, rank)
        lane = communication_time(result, rank)
        ranks.append(_rank_time(makespan, start, finish, lane))
        overlap = _covered(start, finish, lane.finish) - _covered(start, finish, lane.start)
        for kind, total, hidden in zip(lane.kinds, lane.finish - lane.start, overlap, strict=True):
            before = by_kind.get(kind, KindTime(total=0.0, hidden=0.0))
            by_kind[kind] = KindTime(total=before.total + float(total), hidden=before.hidden + float(hidden))
    peak = tuple(
        float(memory_curve(result, rank)[1].max(initial=0.0)) for rank in range(result.program.num_ranks)
    )
    return Summary(makespan=makespan, ranks=tuple(ranks), kinds=by_kind, peak=peak)


def compute_intervals(result: Simulation, rank: int) -> tuple[Floats, Floats]:
    """Start and end of the rank's compute ops, in order."""
    part = result.rank_slice(rank)
    chosen = np.array([op.lane == COMPUTE for op in result.program.ranks[rank]], dtype=bool)
    return result.start[part][chosen], result.finish[part][chosen]


def communication_time(result: Simulation, rank: int) -> CommunicationTime:
    """Everything on the rank's communication lanes; both ends of a transfer count it."""
    part, ops = result.rank_slice(rank), result.program.ranks[rank]
    chosen = np.array([op.lane != COMPUTE for op in ops], dtype=bool)
    ready, start, finish = (a[part][chosen] for a in (result.ready, result.start, result.finish))
    sent = [op.kind for op in ops if op.lane != COMPUTE]
    transfers = result.verified.graph.transfers
    if transfers is not None:
        num_ops = result.verified.graph.num_ops
        for ends, back, there in (
            (transfers.source, kinds.SEND_B, kinds.SEND_F),
            (transfers.destination, kinds.RECV_B, kinds.RECV_F),
        ):
            mine = np.flatnonzero(ends == rank)
            ready, start, finish = (
                np.concatenate([old, new[num_ops + mine]])
                for old, new in ((ready, result.ready), (start, result.start), (finish, result.finish))
            )
            sent += [there if forward else back for forward in transfers.is_forward[mine]]
    ahead = np.array([kind.part is Part.RECV for kind in sent], dtype=bool)
    return CommunicationTime(ready=ready, start=start, finish=finish, kinds=sent, posted_ahead=ahead)


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
    ops: tuple[Op, ...] = result.program.ranks[rank]
    part = result.rank_slice(rank)
    alloc, free = np.array([op.alloc for op in ops]), np.array([op.free for op in ops])
    moments = np.concatenate([result.start[part], result.finish[part]])
    change = np.concatenate([alloc, -free])
    order = np.lexsort((change, moments))  # at one instant, giving back comes first
    held = np.cumsum(change[order])
    keep = change[order] != 0
    return moments[order][keep], np.round(held[keep], 9)
