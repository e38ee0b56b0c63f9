"""Durations of one layer's exchange from the count matrix.

counts_PE[i, e] is the number of rows rank i has for expert e, which lives on rank e // experts_per_rank.
Rows for a shadow that a rank holds stay there. Everything follows from counts and costs, so all ranks that
know the matrix compute the same times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.kinds import Part
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import ExchangeShape, Shadow
from moeclipse.sim.engine import Simulation, simulate

Counts = npt.NDArray[np.int64] | Sequence[Sequence[int]]


class _Rows:
    """Row counts of one step as every rank sees them."""

    def __init__(self, shape: ExchangeShape, counts: Counts) -> None:
        self.shape = shape
        P, E = shape.num_ranks, shape.num_ranks * shape.experts_per_rank
        table = np.asarray(counts, dtype=np.float64)
        if table.shape != (P, E):
            raise ScheduleError(
                f"counts have shape {table.shape}, expected {P} ranks x {E} experts "
                f"({shape.experts_per_rank} per rank)"
            )
        if (table < 0).any():
            raise ScheduleError("counts must not be negative")
        self.kept = np.zeros_like(table)
        for shadow in shape.shadows:
            for rank in shadow.ranks:
                self.kept[rank, shadow.expert] = table[rank, shadow.expert]
        travelling = table - self.kept
        self.sent = travelling.reshape(P, P, shape.experts_per_rank)  # (from, to, local expert)

    def computed(self, rank: int, op: Op) -> float:
        """Rows through experts of one event."""
        assert op.step is not None
        return self._between(list(self.shape.receive_from(rank, op.step)), [rank], op)

    def wire_seconds(self, rank: int, op: Op, costs: ExchangeCosts) -> float:
        """Of one event's rows, sent or received, whichever takes longer; a rank's own do not travel."""
        assert op.step is not None
        out = [p for p in self.shape.send_to(rank, op.step) if p != rank]
        away = [p for p in self.shape.receive_from(rank, op.step) if p != rank]
        if not costs.hosts:
            busiest = max(self._between([rank], out, op), self._between(away, [rank], op))
            return costs.transfer(busiest, near=op.step == 0)
        near, far = (
            max(
                self._between([rank], [p for p in out if (costs.hosts[p] == costs.hosts[rank]) is here], op),
                self._between([p for p in away if (costs.hosts[p] == costs.hosts[rank]) is here], [rank], op),
            )
            for here in (True, False)
        )
        crosses = any(costs.hosts[p] != costs.hosts[rank] for p in (*out, *away))
        return costs.transfer_both(near, far, crosses)

    def _between(self, senders: list[int], receivers: list[int], op: Op) -> float:
        experts = slice(None) if op.expert is None else op.expert
        return float(self.sent[np.ix_(senders, receivers)][..., experts].sum()) / op.chunks


def exchange_durations(program: Program, counts: Counts, costs: ExchangeCosts) -> list[list[float]]:
    """Per rank, per op; dX costs as much as forward, and so does dW."""
    shape = program.exchange()
    rows = _Rows(shape, counts)
    if costs.hosts and len(costs.hosts) != shape.num_ranks:
        raise ScheduleError(
            f"costs name the hosts of {len(costs.hosts)} ranks, but {shape.num_ranks} exchange"
        )
    return [[_seconds(op, rank, rows, costs) for op in ops] for rank, ops in enumerate(program.ranks)]


def _copies(shadows: tuple[Shadow, ...], rank: int) -> int:
    """Shadows this rank sends or receives, whichever is more: both directions of its link work at once."""
    sends = sum(len(shadow.ranks) for shadow in shadows if shadow.owner == rank)
    return max(sends, sum(rank in shadow.ranks for shadow in shadows))


def _seconds(op: Op, rank: int, rows: _Rows, costs: ExchangeCosts) -> float:
    if op.kind.part is Part.SHADOW:
        if op.kind in (kinds.SHADOW_SEND, kinds.SHADOW_REDUCE):
            return costs.parameters(_copies(rows.shape.shadows, rank))
        if op.kind is kinds.SHADOW_ADD:
            return costs.kernel
        return costs.compute(float(rows.kept[rank].sum()))
    if op.kind is kinds.C_W and op.step is None:
        done = rows.sent[list(rows.shape.receive_from(rank, 0)), rank].sum() if rows.shape.own_weights else 0
        return costs.compute(float(rows.sent[:, rank].sum() - done))
    if op.kind.part is Part.C:
        return costs.compute(rows.computed(rank, op))
    if op.step == 0 and rows.shape.keeps_own_rows:
        return 0.0
    return rows.wire_seconds(rank, op, costs)


def simulate_exchange(program: Program | Verified, counts: Counts, costs: ExchangeCosts) -> Simulation:
    """Time the exchange of one layer for these counts."""
    verified = program if isinstance(program, Verified) else verify(program)
    host = Costs(name="exchange", seconds={}, launch=costs.launch, inline_compute=costs.inline_compute)
    return simulate(verified, host, exchange_durations(verified.program, counts, costs))


def lower_bound(program: Program, counts: Counts, costs: ExchangeCosts) -> float:
    """No order can be faster than the busiest lane of the busiest rank."""
    durations = exchange_durations(program, counts, costs)
    busiest = 0.0
    for ops, seconds in zip(program.ranks, durations, strict=True):
        for lane in {op.lane for op in ops}:
            work = sum(s for op, s in zip(ops, seconds, strict=True) if op.lane == lane)
            busiest = max(busiest, work)
    return busiest
