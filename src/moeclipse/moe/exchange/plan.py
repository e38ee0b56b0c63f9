"""From a decision to a plan: which rows stay with shadows, which replica computes which of the others.

shadowed pairs    leave the exchange: this rank computes them with weights that it is lent
guests            where shadows serve others, they are slots behind each rank's own for this call
replicas          each pair gets a slot, from the counts of all ranks
sizes             travel, and with them known every rank has the same plan: here by plain torch, or by kernels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from moeclipse.comm.async_ops.lane import InFlight, Then, gather_to_host
from moeclipse.moe.exchange.dispatch import Dispatcher, DispatchPlan, Sizes, TorchPlan, concatenated, meetings
from moeclipse.moe.exchange.dispatch_on_device import plan_on_device, prepare_sending
from moeclipse.moe.exchange.replicas import choose_slots
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.served import Guests, ServedExperts
from moeclipse.moe.experts.shadow import ShadowExperts, keep_shadowed
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.tokens import Loads, Piggyback
from moeclipse.moe.tune.exchange_policy import Decided, Decision, ExchangeSchedule, plans_on_device
from moeclipse.moe.tune.shadow_choice import gather_counts
from moeclipse.ops.sending import chunk_of
from moeclipse.schedule.shape import ExchangeShape


def plan_call(
    policy: ExchangeSchedule,
    decide: Callable[..., Decision],
    agreed: tuple[Routing, Dispatcher, str],
    *,
    known: Decided | None,
    learns: bool,
    loads: Loads | None,
    on_device: bool,
) -> tuple[Decision, DispatchPlan, torch.Tensor]:
    """A decision and its plan; where sizes are a surprise, both once more, with the counts of all ranks."""
    routing, dispatcher, where = agreed
    on_device = on_device and plans_on_device(routing.scores_TK)
    given = (routing, dispatcher, policy.hosts, where)
    decision = decide(learns=learns, decided=known)
    plan, staying = plan_exchange(decision, *given, loads=loads, on_device=on_device)
    anew = policy.surprised(decision, plan) if learns else None
    if anew is not None:
        if loads is not None and loads.message is not None:
            loads.message.mine = None  # it has been sent
        decision = decide(learns=False, decided=anew)
        plan, staying = plan_exchange(decision, *given, loads=loads, on_device=on_device)
    if learns:
        policy.learn(decision, plan)
    return decision, plan, staying


def plan_exchange(
    decision: Decision,
    routing: Routing,
    dispatcher: Dispatcher,
    hosts: Sequence[int],
    where: str,
    *,
    loads: Loads | None = None,
    on_device: bool = False,
) -> tuple[DispatchPlan, torch.Tensor]:
    """(who sends what to whom, places of the pairs that stay with shadows); no row travels yet.

    `loads` are on their way for other reasons; where they are left out, replicas ask for counts.
    """
    ids_TK, sending, slots = routing.expert_ids_TK, routing.sending, None
    if decision.guests is not None:
        slots = choose_slots(ids_TK, decision.guests, decision.counts_PE, hosts)
        message = None if loads is None else loads.message
        return plan_dispatch(ids_TK, decision.guests, decision.shape, where, slots, message), slots[:0]
    staying = ids_TK.new_empty(0)
    if decision.shadows is not None:
        num_experts = dispatcher.placement.num_experts
        ids_TK, staying = keep_shadowed(ids_TK, decision.shadows, num_experts)
        sending, staying = None, staying[: sum(decision.shadowed)]
    if dispatcher.table is not None:
        counts_PE = travelling(decision, ids_TK, dispatcher, where, loads)
        slots, sending = choose_slots(ids_TK, dispatcher, counts_PE, hosts), None
    if on_device:
        sending = sending or prepare_sending(ids_TK, dispatcher, slots)
        return plan_on_device(sending, dispatcher, decision.shape, where), staying
    message = None if loads is None else loads.message
    return plan_dispatch(ids_TK, dispatcher, decision.shape, where, slots, message), staying


def travelling(
    decision: Decision, ids_TK: torch.Tensor, dispatcher: Dispatcher, where: str, loads: Loads | None
) -> np.ndarray:
    """Rows of each rank for each expert, those of shadowed experts left out: what replicas share."""
    if not decision.counts_PE.size:
        return gather_counts(ids_TK, dispatcher, where) if loads is None else loads.of(dispatcher.group)
    counts_PE = decision.counts_PE.copy()
    for expert, ranks in () if decision.plan is None else decision.plan.shadows:
        counts_PE[list(ranks), expert] = 0
    return counts_PE


def shadows_of(
    decision: Decision,
    staying: torch.Tensor,
    experts: PairwiseExperts,
    dispatcher: Dispatcher,
    where: str,
) -> ShadowExperts | Guests | None:
    """What computes the pairs that stay, or brings what serves others; None where no rank lends anything."""
    if decision.shadows is None:
        return None
    if isinstance(experts.experts, ServedExperts):
        return Guests(decision.shadows, experts.experts, dispatcher.transport, where=where)
    return ShadowExperts(
        decision.shadows,
        experts,
        dispatcher.transport,
        place_m=staying,
        counts=decision.shadowed,
        where=where,
    )


def plan_dispatch(
    expert_ids_TK: torch.Tensor,
    dispatcher: Dispatcher,
    shape: ExchangeShape,
    where: str,
    slots: torch.Tensor | None = None,
    message: Piggyback | None = None,
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
    everyone = exchange_sizes(dispatcher, torch.cat([pairs, rows_P]), where, message)

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
    dispatcher: Dispatcher, mine: torch.Tensor, where: str, message: Piggyback | None
) -> InFlight[list[list[int]]]:
    """Those of all ranks, with what else there is to tell in the same message."""
    lane, group, label = dispatcher.lane, dispatcher.group, f"exchange of sizes, {where}"
    if message is None or message.mine is None:
        return gather_to_host(lane, group, mine, label)

    def split(table: list[list[int]]) -> list[list[int]]:
        sizes, others = [row[: len(mine)] for row in table], [row[len(mine) :] for row in table]
        message.arrived(others)
        return sizes

    return Then(gather_to_host(lane, group, torch.cat([mine, message.mine]), label), split)


def sort_key(
    slots: torch.Tensor, ranks: torch.Tensor, chunk: torch.Tensor, slot_bounds: Sequence[int], chunks: int
) -> torch.Tensor:
    """A number for each (rank, chunk, expert), in that order."""
    first = torch.tensor(slot_bounds, device=slots.device)
    width = first[ranks + 1] - first[ranks]
    return first[ranks] * chunks + chunk * width + (slots - first[ranks])
