"""Which replica computes which row, decided anew in each call of a layer.

    counts [P, E]     how many rows each rank has for each expert: the ranks' loads, which travel anyway
    split  [P, slots] how many of them each replica takes (`balance/split`), the same answer on every rank
    slots             for each (token, expert) choice of this rank the slot that computes it

A rank's rows of an expert fill its replicas' quotas in the order of tokens, the replica of its own rank
first. Sizes travel afterwards as always, so what a receiver expects never depends on counts: wrong ones (a
gate that drops rows after it has counted them) cost balance, not correctness.

In a user's own training loop `sum_over_replicas` gives every replica the gradient of all of them. The trainer
sums to the primary instead (`train/placement/expert_buckets`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moeclipse.balance.placement import Placement
from moeclipse.balance.split import split_rows
from moeclipse.comm.async_ops.lane import Lane, all_to_all
from moeclipse.comm.async_ops.reading import send
from moeclipse.comm.group import Group
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.ops.grouping import rank_among_equals


def choose_slots(
    expert_ids_TK: torch.Tensor,
    dispatcher: Dispatcher,
    counts_PE: np.ndarray,
    node_P: Sequence[int] | None = None,
) -> torch.Tensor:
    """The slot of each choice, flattened; that of unused places is any."""
    assert dispatcher.table is not None
    me, device = dispatcher.group.index, expert_ids_TK.device
    quota_R = split_rows(counts_PE, dispatcher.table, node_P).rows_PR[me]
    order = dispatcher.quota_order
    first_E = order.first_E
    quota_R = quota_R[order.slots_R]
    # Where the quotas of each slot begin when all rows of this rank are laid out by expert.
    ends_R = np.cumsum(quota_R)
    begin_E = np.concatenate([[0], ends_R])[first_E[:-1]]
    last_E = first_E[1:] - 1
    numbers = np.concatenate([ends_R, order.slots_R, begin_E, first_E[:-1], last_E])
    sizes = [len(ends_R)] * 2 + [len(begin_E)] * 3
    ends, slots, begin, first, last = send(torch.from_numpy(numbers), device).split(sizes)
    flat = expert_ids_TK.flatten()
    known = flat.clamp(min=0)
    place = begin[known] + rank_among_equals(flat)
    found = torch.searchsorted(ends, place, right=True)
    return slots[torch.minimum(torch.maximum(found, first[known]), last[known])]


def sum_over_replicas(
    grad: torch.Tensor, placement: Placement, group: Group, lane: Lane, label: str
) -> torch.Tensor:
    """Gradients stacked by slot, each summed over the expert's replicas in the order of their ranks."""
    me = group.index
    shared = [expert for expert, ranks in enumerate(placement.holders) if len(ranks) > 1]
    mine = [expert for expert in shared if me in placement.holders[expert]]
    slot_of = {expert: slot for slot, expert in enumerate(placement.slots[me]) if expert >= 0}
    by_peer = [[e for e in mine if peer != me and peer in placement.holders[e]] for peer in range(group.size)]
    rows = grad[[slot_of[e] for experts in by_peer for e in experts]]
    counts = [len(experts) for experts in by_peer]
    arrived = all_to_all(lane, group, rows, counts, counts, label).get().split(counts)
    total = grad.clone()
    total[[slot_of[e] for e in mine]] = 0
    for peer, (experts, part) in enumerate(zip(by_peer, arrived, strict=True)):
        chosen = mine if peer == me else experts
        part = grad[[slot_of[e] for e in mine]] if peer == me else part
        total[[slot_of[e] for e in chosen]] += part
    return total
