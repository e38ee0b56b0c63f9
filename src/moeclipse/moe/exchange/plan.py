"""From a decision to a plan: which rows stay with shadows, which replica computes which of the others.

shadowed pairs    leave the exchange: this rank computes them with weights that it is lent
guests            where shadows serve others, they are slots behind each rank's own for this call
replicas          each pair gets a slot, from the counts of all ranks
sizes             travel, and with them known every rank has the same plan (`dispatch`, or by kernels)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moeclipse.moe.exchange.dispatch import Dispatcher, DispatchPlan, plan_dispatch
from moeclipse.moe.exchange.dispatch_on_device import plan_on_device, prepare_sending
from moeclipse.moe.exchange.replicas import choose_slots
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.served import Guests, ServedExperts
from moeclipse.moe.experts.shadow import ShadowExperts, keep_shadowed
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.tokens import Loads
from moeclipse.moe.tune.exchange_policy import Decision
from moeclipse.moe.tune.shadow_choice import gather_counts


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
        told = None if loads is None else loads.told
        return plan_dispatch(ids_TK, decision.guests, decision.shape, where, slots, told), slots[:0]
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
    told = None if loads is None else loads.told
    return plan_dispatch(ids_TK, dispatcher, decision.shape, where, slots, told), staying


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
