"""Which row goes to whom, and back: counts first, then rows, nothing padded.

A *pair* is one (token, expert) choice; a *row* is a token's vector on its way to a rank. When several of a
token's experts live on one rank, its vector travels there once, and one partial sum returns. Beside the rows
travel, for each pair, the place of its row and its score (8 bytes).

Rows are cut into *units* (step, chunk): at step s a rank sends to one group of ranks and receives from
another, and the rows for each rank are cut into chunks. One step and one chunk make the blocking exchange.

    sender     pairs sorted by (rank, chunk, expert, token)     rows sorted by (unit, rank, token)
    round 1    [pairs for each chunk and expert, rows for each rank]  from everyone to everyone
    round 2    pairs at once, rows unit by unit
    receiver   rows in the order (unit, source, token); pairs regrouped by (unit, expert, source, token)

Where an expert has several replicas, `moe/exchange/replicas` has chosen a slot for each pair before sizes
travel, so nothing here knows of replicas: a pair goes to a slot, and a slot is on a rank.

All index arithmetic is done once for all units; a unit is a slice of each array. All sizes come to the
host in one copy. The plan is made in forward, and backward runs over the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch

from moeclipse.balance.placement import Placement
from moeclipse.balance.split import QuotaOrder, ReplicaTable
from moeclipse.comm.async_ops.lane import InFlight, Lane, TorchTransport
from moeclipse.comm.group import Group
from moeclipse.comm.transports.transport import Transport
from moeclipse.core.shares import bounds_of_all
from moeclipse.ops.arrival import BITS_OF, Segments
from moeclipse.ops.combine import sum_rows
from moeclipse.ops.grouping import Grouping
from moeclipse.ops.sending import Places
from moeclipse.schedule.shape import ExchangeShape


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """A placement as tensors on the device, and the ranks that share it."""

    placement: Placement
    rank_of_E: torch.Tensor
    """Of each expert's primary."""
    slot_of_E: torch.Tensor
    """The place of its primary when slots are counted rank by rank."""
    group: Group
    lane: Lane
    transport: Transport
    table: ReplicaTable | None = None
    """How rows are shared among replicas; None where every expert has one."""

    @classmethod
    def of(
        cls,
        placement: Placement,
        group: Group,
        lane: Lane,
        device: torch.device,
        transport: Transport | None = None,
        expected_E: np.ndarray | None = None,
    ) -> Dispatcher:
        """`expected_E`: the loads that the placement was planned for, the same on all ranks."""
        replicated = placement.num_replicas > placement.num_experts
        return cls(
            placement=placement,
            rank_of_E=torch.tensor(placement.primary, device=device),
            slot_of_E=torch.tensor(placement.slot_of, device=device),
            group=group,
            lane=lane,
            transport=transport or TorchTransport(lane, group),
            table=ReplicaTable.of(placement, expected_E) if replicated else None,
        )

    def moved(self, placement: Placement, expected_E: np.ndarray | None = None) -> Dispatcher:
        """The same ranks and wire, another placement.

        Tables of the same shape stay where they are and change: what was captured goes on reading them.
        """
        device = self.rank_of_E.device
        moved = Dispatcher.of(placement, self.group, self.lane, device, self.transport, expected_E)
        if moved.slot_bounds != self.slot_bounds:
            return moved
        for mine, theirs in zip(self._tables(), moved._tables(), strict=True):
            mine.copy_(theirs)
        kept = replace(moved, rank_of_E=self.rank_of_E, slot_of_E=self.slot_of_E)
        vars(kept).update(rank_of_slot=self.rank_of_slot, places=self.places)
        return kept

    def _tables(self) -> tuple[torch.Tensor, ...]:
        return self.rank_of_E, self.slot_of_E, self.rank_of_slot, self.places.first_slot_P1

    @cached_property
    def slot_bounds(self) -> list[int]:
        """Slots of rank p: slot_bounds[p] to slot_bounds[p + 1] - 1, empty ones included."""
        return [0, *accumulate(map(len, self.placement.slots))]

    @cached_property
    def holds_all(self) -> bool:
        """Whether this rank has every expert, in order: then nothing is dispatched."""
        everyone = tuple(range(self.placement.num_experts))
        return self.group.size == 1 and self.placement.slots == (everyone,)

    @cached_property
    def quota_order(self) -> QuotaOrder:
        return QuotaOrder.of(self.placement, self.group.index)

    @cached_property
    def places(self) -> Places:
        first = torch.tensor(self.slot_bounds, device=self.rank_of_E.device)
        return Places(rank_of_slot=self.rank_of_slot, first_slot_P1=first, num_slots=self.slot_bounds[-1])

    @cached_property
    def rank_of_slot(self) -> torch.Tensor:
        ranks = [rank for rank, row in enumerate(self.placement.slots) for _ in row]
        return torch.tensor(ranks, dtype=torch.int64, device=self.rank_of_E.device)


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Who sends what to whom. N rows and n pairs are sent; R rows and M pairs arrive."""

    dispatcher: Dispatcher
    where: str
    num_tokens: int
    units: dict[tuple[int, int], Unit]
    row_token_N: torch.Tensor
    pair_place_n: torch.Tensor
    """Of each pair sent, its place in the flattened (token, choice) table."""
    send_pairs: list[int]
    receive_pairs: list[int]
    num_arriving: int
    sizes: Sizes

    def take_rows(self, x_TD: torch.Tensor) -> torch.Tensor:
        """What this rank sends of its tokens' vectors, or of numbers that go with them."""
        return x_TD[self.row_token_N]

    def sum_tokens(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """The partial sums that came back, added for each token."""
        return sum_rows(rows_ND, self.row_token_N, self.num_tokens)

    def send_pairs_of(self, scores_TK: torch.Tensor) -> ArrivingPairs:
        """Where rows are for whom, and how much they count, to the ranks that compute them."""
        raise NotImplementedError

    def send_packed(self, packed: torch.Tensor) -> tuple[torch.Tensor, InFlight[torch.Tensor]]:
        """What is told of each pair, in sending order: (that of this rank's own rows, what arrives)."""
        me = self.dispatcher.group.index
        first, label = sum(self.send_pairs[:me]), f"dispatch of scores, {self.where}"
        given = (packed, self.send_pairs, self.receive_pairs, label)
        return packed[first : first + self.send_pairs[me]], self.dispatcher.transport.all_to_all(*given)

    def return_score_grads(self, d_score_M: torch.Tensor) -> InFlight[torch.Tensor]:
        """Back to the ranks whose gate gave the scores, in the order the pairs were sent."""
        raise NotImplementedError

    def place_score_grads(self, d_score_n: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What came back, for each choice; zeros where there was nothing."""
        d_scores_TK = d_score_n.new_zeros(shape)
        d_scores_TK.view(-1)[self.pair_place_n] = d_score_n
        return d_scores_TK


class ArrivingPairs(Protocol):
    """Pairs on their way to this rank, in the order of units and experts."""

    def of(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, counted from the first of the unit; scores) of its pairs."""
        ...

    def grouping(self, unit: Unit, /) -> Grouping | None:
        """What kernels read of them, where it is known already."""
        ...


@dataclass(frozen=True, kw_only=True)
class TorchPlan(DispatchPlan):
    """By plain torch; the kernels' is `moe/exchange/dispatch_on_device`."""

    pair_row_n: torch.Tensor
    """Of each pair sent, its row counted from the first row sent to the same rank."""
    regroup_M: torch.Tensor
    """From arrival order (source, chunk, expert, token) to (unit, expert, source, token)."""
    row_shift_M: torch.Tensor
    """Of each pair that arrives, what leads from its row's number at the source to its row's place here."""

    def send_pairs_of(self, scores_TK: torch.Tensor) -> TorchPairs:
        return TorchPairs(self, scores_TK)

    def return_score_grads(self, d_score_M: torch.Tensor) -> InFlight[torch.Tensor]:
        arrival = torch.empty_like(d_score_M)
        arrival[self.regroup_M] = d_score_M
        label = f"return of score gradients, {self.where}"
        return self.dispatcher.transport.all_to_all(arrival, self.receive_pairs, self.send_pairs, label)


class TorchPairs:
    """Those of rows that stay on this rank are known before anything arrives: their unit need not wait."""

    def __init__(self, plan: TorchPlan, scores_TK: torch.Tensor) -> None:
        self.plan = plan
        self.integer = BITS_OF[scores_TK.dtype]
        # Row places and scores travel bit-packed, side by side, in the scores' own type.
        places = plan.pair_row_n.to(self.integer).view(scores_TK.dtype)
        packed = torch.stack([places, scores_TK.flatten()[plan.pair_place_n]], dim=1)
        self._own, self._arriving = plan.send_packed(packed)
        self._all: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        if unit.local and self._all is None:
            plan = self.plan
            arrival = plan.regroup_M[unit.pairs]
            start = sum(plan.receive_pairs[: plan.dispatcher.group.index])
            row_M, score_M = self._unpack(self._own[arrival - start], plan.row_shift_M[arrival])
            return row_M - unit.arriving.start, score_M
        row_M, score_M = self.all()
        return row_M[unit.pairs] - unit.arriving.start, score_M[unit.pairs]

    def grouping(self, _: Unit) -> None:
        return None

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows are counted over all that arrive."""
        if self._all is None:
            regroup_M = self.plan.regroup_M
            packed = self._arriving.get()[regroup_M]
            self._all = self._unpack(packed, self.plan.row_shift_M[regroup_M])
        return self._all

    def _unpack(self, packed: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = packed[:, 0].contiguous().view(self.integer).to(torch.int64) + shift
        return row, packed[:, 1]


def concatenated(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """range(start, start + length) of each part, one after the other, as indices on the device."""
    shifts, total = [], 0
    for start, length in zip(starts, lengths, strict=True):
        shifts.append(start - total)
        total += length
    shift, length = torch.tensor([shifts, lengths], dtype=torch.int64, device=device).view(2, -1)
    return torch.arange(total, device=device) + shift.repeat_interleave(length)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One slice of the exchange: which rows leave, which arrive, and what the experts do with them."""

    leaving: slice
    """Of the rows this rank sends."""
    arriving: slice
    """Of the rows this rank receives."""
    pairs: slice
    """Of the pairs it computes."""
    send_rows: list[int]
    receive_rows: list[int]
    counts: list[int]
    """Pairs for each expert of this rank."""
    local: bool
    """On every rank these rows stay where they are: nobody waits for anybody."""


@dataclass(frozen=True, kw_only=True)
class Meetings:
    """Whom a rank meets in each unit of an exchange, whatever its sizes: found once for each shape."""

    chunks: int
    """Between any two ranks, at most."""
    cuts: tuple[int, ...]
    """Into how many chunks the rows between this rank and each other are cut, in both directions."""
    send: tuple[tuple[int, ...], ...]
    receive: tuple[tuple[int, ...], ...]
    local: tuple[bool, ...]
    """Units in which no row leaves its rank."""


@cache
def meetings(shape: ExchangeShape, me: int) -> Meetings:
    near = shape.send_to(me, 0)
    return Meetings(
        chunks=shape.most_chunks,
        cuts=tuple(shape.own_chunks if rank in near else shape.chunks for rank in range(shape.num_ranks)),
        send=tuple(tuple(sorted(shape.send_to(me, step))) for step, _ in shape.units),
        receive=tuple(tuple(sorted(shape.receive_from(me, step))) for step, _ in shape.units),
        local=tuple(step == 0 and shape.keeps_own_rows for step, _ in shape.units),
    )


class Sizes:
    """The table that everyone has after round 1, read from one rank's point of view.

    A segment is what travels between two ranks in one chunk; segments of arriving rows are counted
    source by source, chunk by chunk.
    """

    def __init__(self, table: list[list[int]], slot_bounds: list[int], me: int, shape: ExchangeShape) -> None:
        self.meetings = met = meetings(shape, me)
        self.units_in_order, self.chunks = shape.units, met.chunks
        self.table, self.slot_bounds = table, slot_bounds
        num_ranks, num_pairs = len(table), slot_bounds[-1] * self.chunks
        self.num_mine = slot_bounds[me + 1] - slot_bounds[me]
        ranks = range(num_ranks)
        mine = slice(slot_bounds[me] * self.chunks, slot_bounds[me + 1] * self.chunks)
        blocks = [slice(slot_bounds[p] * self.chunks, slot_bounds[p + 1] * self.chunks) for p in ranks]
        self.send_pairs = [sum(table[me][block]) for block in blocks]
        arriving = [source[mine] for source in table]  # [source][chunk x my expert]
        self.arriving_pairs = [count for counts in arriving for count in counts]
        self.receive_pairs = [sum(counts) for counts in arriving]
        leaving, coming = table[me][num_pairs:], [source[num_pairs + me] for source in table]
        totals = [*leaving, *coming]
        bounds = [[0, n] for n in totals] if met.chunks == 1 else bounds_of_all(totals, 2 * met.cuts)
        send_cuts, cuts = bounds[:num_ranks], bounds[num_ranks:]
        self.send_rows, self.receive_rows = [], []
        self.leaving_starts: list[int] = []
        self.leaving_lengths: list[int] = []
        starts = [0]
        for rows in leaving:
            starts.append(starts[-1] + rows)
        self.row_shift = [0] * (num_ranks * self.chunks)
        self.unit_of_segment = [0] * (num_ranks * self.chunks)
        arrived = 0
        for number, (_, chunk) in enumerate(shape.units):
            send, receive = [0] * num_ranks, [0] * num_ranks
            for peer in met.send[number]:
                send[peer] = send_cuts[peer][chunk + 1] - send_cuts[peer][chunk]
                self.leaving_starts.append(starts[peer] + send_cuts[peer][chunk])
                self.leaving_lengths.append(send[peer])
            for peer in met.receive[number]:
                receive[peer] = cuts[peer][chunk + 1] - cuts[peer][chunk]
                self.unit_of_segment[peer * self.chunks + chunk] = number
                self.row_shift[peer * self.chunks + chunk] = arrived - cuts[peer][chunk]
                arrived += receive[peer]
            self.send_rows.append(send)
            self.receive_rows.append(receive)

    def rows_by_rank(self) -> np.ndarray:
        """That come to each rank, its own among them."""
        first = self.slot_bounds[-1] * self.chunks
        return np.array([row[first:] for row in self.table], dtype=np.int64).sum(0)

    def pairs_by_slot(self) -> np.ndarray:
        """Pairs of each rank for each slot of all ranks, [P, R]."""
        table, cut = np.array(self.table, dtype=np.int64), self.chunks
        parts = [
            table[:, cut * first : cut * stop].reshape(len(table), cut, stop - first).sum(1)
            for first, stop in pairwise(self.slot_bounds)
        ]
        return np.concatenate(parts, axis=1)

    def units(self) -> dict[tuple[int, int], Unit]:
        found: dict[tuple[int, int], Unit] = {}
        left = arrived = paired = 0
        sizes = zip(self.units_in_order, self.send_rows, self.receive_rows, strict=True)
        for number, ((step, chunk), send, receive) in enumerate(sizes):
            counts = [0] * self.num_mine
            for source in self.meetings.receive[number]:
                first = (source * self.chunks + chunk) * self.num_mine
                for slot in range(self.num_mine):
                    counts[slot] += self.arriving_pairs[first + slot]
            unit = Unit(
                leaving=slice(left, left + sum(send)),
                arriving=slice(arrived, arrived + sum(receive)),
                pairs=slice(paired, paired + sum(counts)),
                send_rows=send,
                receive_rows=receive,
                counts=counts,
                local=self.meetings.local[number],
            )
            left, arrived, paired = unit.leaving.stop, unit.arriving.stop, unit.pairs.stop
            found[step, chunk] = unit
        return found

    def segments(self) -> Segments:
        """Pairs that arrive, of each source, chunk and slot: where they go among those of all units."""
        units, slots = list(self.units().values()), max(self.num_mine, 1)
        unit_of = np.repeat(self.unit_of_segment, self.num_mine)
        length = np.array(self.arriving_pairs, dtype=np.int64)
        order = np.argsort(unit_of * slots + np.arange(len(length)) % slots, kind="stable")
        goes_to = np.empty_like(length)
        goes_to[order] = np.cumsum(length[order]) - length[order]
        return Segments(
            length=length,
            goes_to=goes_to,
            row_shift=np.repeat(self.row_shift, self.num_mine),
            first_row=np.array([unit.arriving.start for unit in units])[unit_of],
            first_pair=np.array([unit.pairs.start for unit in units])[unit_of],
        )
