"""`moe/exchange/dispatch` by kernels: who sends what to whom, with one device-to-host copy, of the sizes.

In plain torch a plan is a hundred small operations, and the host took longer for them than the device for the
layer. Here it is a dozen kernels (`ops/sending`, `ops/arrival`); those before the sizes have fixed shapes, so
they can be part of a CUDA graph (`model/front`), and those behind them read one table that the host has made.

Contract. Units, sizes, and the order of rows and pairs are those of `TorchPlan`. All ranks of a group plan in
the same way, because pairs travel in another form: as `row * K + j` (`ops/sending`). So what decides
(`tune/exchange_policy.plans_on_device`) is the same on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from moeclipse.comm.async_ops.lane import InFlight, gather_to_host
from moeclipse.comm.async_ops.reading import send
from moeclipse.moe.exchange.dispatch import Dispatcher, DispatchPlan, Sizes, Unit, concatenated, meetings
from moeclipse.ops import arrival
from moeclipse.ops.arrival import Arrived
from moeclipse.ops.combine import gather_sum
from moeclipse.ops.grouping import Grouping, group_counts
from moeclipse.ops.pick import pick
from moeclipse.ops.sending import Sending, pairs_to_send, rows_to_send
from moeclipse.schedule.shape import ExchangeShape


def prepare_sending(
    expert_ids_TK: torch.Tensor, dispatcher: Dispatcher, slots: torch.Tensor | None = None
) -> Sending:
    """`slots`: of each choice, flattened, the slot that computes it; left out: that of its primary."""
    if slots is None:
        slots = dispatcher.slot_of_E[expert_ids_TK.flatten().clamp(min=0).long()]
    slots_TK = torch.where(expert_ids_TK >= 0, slots.view(expert_ids_TK.shape), -1)
    rows = rows_to_send(slots_TK, dispatcher.places)
    return Sending(slots_TK=slots_TK, rows=rows, pairs=pairs_to_send(slots_TK, rows, dispatcher.places))


def plan_on_device(sending: Sending, dispatcher: Dispatcher, shape: ExchangeShape, where: str) -> DevicePlan:
    me, rows, pairs, device = dispatcher.group.index, sending.rows, sending.pairs, sending.slots_TK.device
    if shape.most_chunks > 1:
        cuts_P = send(torch.tensor(meetings(shape, me).cuts), device)
        given = (sending.slots_TK, rows, dispatcher.places, cuts_P, shape.most_chunks)
        pairs = pairs_to_send(*given)
    mine, label = torch.cat([pairs.pairs_S, rows.rows_P]), f"exchange of sizes, {where}"
    table = gather_to_host(dispatcher.lane, dispatcher.group, mine, label).get()
    sizes = Sizes(table, dispatcher.slot_bounds, me, shape)
    units, segments = sizes.units(), sizes.segments()
    num_rows = sum(sizes.leaving_lengths)
    in_order = [0, *accumulate(sizes.leaving_lengths)][:-1] == sizes.leaving_starts
    row_token_N = rows.row_token_M[:num_rows]
    if not in_order:
        parts = concatenated(sizes.leaving_starts, sizes.leaving_lengths, device)
        row_token_N = rows.row_token_M[parts]
    # One copy for all that the host knows now and kernels read later.
    of_segments = segments.table()
    counts = torch.tensor([unit.counts for unit in units.values()], dtype=torch.int32).view(len(units), -1)
    told = send(torch.cat([of_segments.flatten(), counts.flatten()]), device)
    return DevicePlan(
        dispatcher=dispatcher,
        where=where,
        num_tokens=len(sending.slots_TK),
        units=units,
        row_token_N=row_token_N,
        token_row_TK=rows.token_row_TK if in_order else None,
        pair_place_n=pairs.pair_place_M[: sum(sizes.send_pairs)],
        place_pair_TK=pairs.place_pair_TK,
        address_TK=rows.address_TK,
        send_pairs=sizes.send_pairs,
        receive_pairs=sizes.receive_pairs,
        num_arriving=sum(sum(rows) for rows in sizes.receive_rows),
        sizes=sizes,
        segments_6S=told[: of_segments.numel()].view(of_segments.shape),
        longest=int(segments.length.max(initial=0)),
        counts_US=told[of_segments.numel() :].view(counts.shape),
    )


@dataclass(frozen=True, kw_only=True)
class DevicePlan(DispatchPlan):
    token_row_TK: torch.Tensor | None
    """Of each choice its row, once for each rank that the token goes to, else -1; None: rows leave in another
    order than that of ranks."""
    place_pair_TK: torch.Tensor
    address_TK: torch.Tensor
    segments_6S: torch.Tensor
    """See `ops/arrival`."""
    longest: int
    """Of the segments."""
    counts_US: torch.Tensor
    """Of each unit the pairs for each slot."""

    def take_rows(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD.index_select(0, self.row_token_N)

    def sum_tokens(self, rows_ND: torch.Tensor) -> torch.Tensor:
        if self.token_row_TK is None or rows_ND.dim() != 2:
            return super().sum_tokens(rows_ND)
        return gather_sum(rows_ND, self.token_row_TK)

    def send_pairs_of(self, scores_TK: torch.Tensor) -> DevicePairs:
        return DevicePairs(self, scores_TK)

    def return_score_grads(self, d_score_M: torch.Tensor) -> InFlight[torch.Tensor]:
        order = arrival.send_order_kernel if d_score_M.is_cuda else arrival.send_order_reference
        sent = order(d_score_M, self.segments_6S, self.longest)
        label = f"return of score gradients, {self.where}"
        return self.dispatcher.transport.all_to_all(sent, self.receive_pairs, self.send_pairs, label)

    def place_score_grads(self, d_score_n: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return pick(d_score_n, self.place_pair_TK).view(shape)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what begins in the middle of 16 bytes: kernels would be compiled a second time for it."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


class DevicePairs:
    """Those of rows that stay on this rank are known before anything arrives: their unit need not wait."""

    def __init__(self, plan: DevicePlan, scores_TK: torch.Tensor) -> None:
        self.plan, self.top_k = plan, scores_TK.shape[1]
        pack = arrival.pack_kernel if scores_TK.is_cuda else arrival.pack_reference
        packed = pack(plan.address_TK, scores_TK, plan.pair_place_n)
        self._own, self._arriving = plan.send_packed(packed)
        self._of_own: Arrived | None = None
        self._all: Arrived | None = None

    def of(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._arrived(unit)
        return aligned(found.row_M[unit.pairs]), aligned(found.score_M[unit.pairs])

    def grouping(self, unit: Unit) -> Grouping:
        number = list(self.plan.units.values()).index(unit)
        found = self._arrived(unit)
        num_pairs = unit.pairs.stop - unit.pairs.start
        grouping = group_counts(aligned(self.plan.counts_US[number]), num_pairs)
        places_RK = aligned(found.places_RK[unit.arriving])
        return replace(grouping, row_token_M=aligned(found.row_M[unit.pairs]), place_row_TK=places_RK)

    def _arrived(self, unit: Unit) -> Arrived:
        plan, me = self.plan, self.plan.dispatcher.group.index
        if unit.local and self._all is None:
            if self._of_own is None:
                count = plan.segments_6S.shape[1] // plan.dispatcher.group.size
                segments_6S = plan.segments_6S[:, me * count : (me + 1) * count]
                self._of_own = self._unpack(self._own, segments_6S, sum(plan.receive_pairs[:me]))
            return self._of_own
        if self._all is None:
            self._all = self._unpack(self._arriving.get(), plan.segments_6S)
        return self._all

    def _unpack(self, packed: torch.Tensor, segments_6S: torch.Tensor, first: int = 0) -> Arrived:
        """`first`: where the first of `packed` stands among all that arrive."""
        plan = self.plan
        unpack = arrival.unpack_kernel if packed.is_cuda else arrival.unpack_reference
        most = max(1, min(self.top_k, plan.sizes.num_mine))
        sizes = {"num_pairs": sum(plan.receive_pairs), "num_rows": plan.num_arriving, "most": most}
        return unpack(packed, segments_6S, first=first, top_k=self.top_k, longest=plan.longest, **sizes)
