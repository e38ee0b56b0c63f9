"""The sizes of an exchange, which everyone knows before rows travel, read from one rank's point of view."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from moeclipse.core.shares import bounds_of_all
from moeclipse.ops.arrival import Segments
from moeclipse.schedule.shape import ExchangeShape


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
