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
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from moeclipse.balance.placement import Placement
from moeclipse.balance.quota import QuotaOrder
from moeclipse.balance.split import ReplicaTable
from moeclipse.comm.async_ops.lane import InFlight, Lane, Then, gather_to_host
from moeclipse.comm.group import Group
from moeclipse.comm.transports.transport import TorchTransport, Transport
from moeclipse.moe.exchange.sizes import Sizes, Unit, meetings
from moeclipse.moe.tokens import Told
from moeclipse.ops.arrival import BITS_OF
from moeclipse.ops.combine import sum_rows
from moeclipse.ops.grouping import Grouping
from moeclipse.ops.sending import Places, chunk_of
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

    def grouping(self, unit: Unit, /) -> Grouping | None:
        """What kernels read of them, where it is known already."""


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


def plan_dispatch(
    expert_ids_TK: torch.Tensor,
    dispatcher: Dispatcher,
    shape: ExchangeShape,
    where: str,
    slots: torch.Tensor | None = None,
    told: Told | None = None,
) -> TorchPlan:
    """`slots`: of each choice, flattened, the slot that computes it; left out: that of its primary."""
    num_tokens, top_k = expert_ids_TK.shape
    met, device = meetings(shape, dispatcher.group.index), expert_ids_TK.device
    slot_bounds, num_ranks, chunks = dispatcher.slot_bounds, dispatcher.group.size, met.chunks
    flat_ids = expert_ids_TK.flatten()
    used = flat_ids >= 0
    if slots is None:
        slots = dispatcher.slot_of_E[flat_ids.clamp(min=0)]
    ranks = dispatcher.rank_of_slot[slots]
    tokens = torch.arange(num_tokens, device=device).repeat_interleave(top_k)

    # Unused places mark an extra rank that nobody is.
    sent_PT = torch.zeros(num_ranks + 1, num_tokens, dtype=torch.bool, device=device)
    sent_PT[torch.where(used, ranks, num_ranks), tokens] = True
    sent_PT = sent_PT[:num_ranks]
    row_of_PT = sent_PT.cumsum(1) - 1
    rows_P = sent_PT.sum(1)
    pair_row = row_of_PT[ranks, tokens]
    chunk = torch.zeros_like(pair_row)
    if chunks > 1:
        cuts_P = torch.tensor(met.cuts, device=device)
        chunk = chunk_of(pair_row, rows_P[ranks], cuts_P[ranks])
    key = sort_key(slots, ranks, chunk, slot_bounds, chunks)
    key = torch.where(used, key, slot_bounds[-1] * chunks)
    pairs = torch.bincount(key, minlength=slot_bounds[-1] * chunks + 1)[: slot_bounds[-1] * chunks]
    everyone = exchange_sizes(dispatcher, torch.cat([pairs, rows_P]), where, told)

    # Local sorting runs while the sizes travel.
    order = key.argsort(stable=True)
    row_token = sent_PT.nonzero()[:, 1]
    sizes = Sizes(everyone.get(), slot_bounds, dispatcher.group.index, shape)
    order = order[: sum(sizes.send_pairs)]
    expert_M = torch.arange(sizes.num_mine, device=device).repeat(num_ranks * chunks)
    arriving_pairs = torch.tensor(sizes.arriving_pairs, dtype=torch.int64, device=device)
    per_segment = arriving_pairs.view(num_ranks * chunks, -1).sum(1)
    unit_M = torch.tensor(sizes.unit_of_segment, device=device).repeat_interleave(per_segment)
    expert_M = expert_M.repeat_interleave(arriving_pairs)
    return TorchPlan(
        dispatcher=dispatcher,
        where=where,
        num_tokens=num_tokens,
        units=sizes.units(),
        row_token_N=row_token[concatenated(sizes.leaving_starts, sizes.leaving_lengths, device)],
        pair_place_n=order,
        pair_row_n=pair_row[order],
        send_pairs=sizes.send_pairs,
        receive_pairs=sizes.receive_pairs,
        num_arriving=sum(sum(rows) for rows in sizes.receive_rows),
        regroup_M=(unit_M * max(sizes.num_mine, 1) + expert_M).argsort(stable=True),
        row_shift_M=torch.tensor(sizes.row_shift, device=device).repeat_interleave(per_segment),
        sizes=sizes,
    )


def exchange_sizes(
    dispatcher: Dispatcher, mine: torch.Tensor, where: str, told: Told | None
) -> InFlight[list[list[int]]]:
    """Those of all ranks, with what else there is to tell in the same message."""
    lane, group, label = dispatcher.lane, dispatcher.group, f"exchange of sizes, {where}"
    if told is None or told.mine is None:
        return gather_to_host(lane, group, mine, label)

    def split(table: list[list[int]]) -> list[list[int]]:
        sizes, others = [row[: len(mine)] for row in table], [row[len(mine) :] for row in table]
        told.arrived(others)
        return sizes

    return Then(gather_to_host(lane, group, torch.cat([mine, told.mine]), label), split)


def sort_key(
    slots: torch.Tensor, ranks: torch.Tensor, chunk: torch.Tensor, slot_bounds: Sequence[int], chunks: int
) -> torch.Tensor:
    """A number for each (rank, chunk, expert), in that order."""
    first = torch.tensor(slot_bounds, device=slots.device)
    width = first[ranks + 1] - first[ranks]
    return first[ranks] * chunks + chunk * width + (slots - first[ranks])


def concatenated(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """range(start, start + length) of each part, one after the other, as indices on the device."""
    shifts, total = [], 0
    for start, length in zip(starts, lengths, strict=True):
        shifts.append(start - total)
        total += length
    shift, length = torch.tensor([shifts, lengths], dtype=torch.int64, device=device).view(2, -1)
    return torch.arange(total, device=device) + shift.repeat_interleave(length)
