"""Capacity: how many rows an expert takes, and which assignments are within it.

    position   first choices in the order of tokens, then second choices; over all ranks, or on each
    score      the rows with the highest scores (equal ones: `moe/gate/routing`); on each rank, because those
               of others are not known

Counted over all ranks (the default), which rows are dropped does not depend on how tokens are shared out.
Counted on each rank, as other libraries do, nothing has to be exchanged, and a layout is part of the model.
Rows that find no room get the number -1. Their scores keep their share, unless `renormalise_kept`.
"""

from __future__ import annotations

import math

import torch

from moeclipse.moe.config import GateConfig
from moeclipse.moe.gate.routing import count_experts, order_of
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.grouping import rank_among_equals


def room_for(config: GateConfig, num_tokens: int, num_experts: int, training: bool) -> int:
    """Rows that an expert takes of so many tokens; 0: no bound."""
    evaluates = not training and config.eval_capacity_factor >= 0
    factor = config.eval_capacity_factor if evaluates else config.capacity_factor
    if not factor:
        return 0
    rows = num_tokens * config.expected_experts
    return max(math.ceil(factor * rows / num_experts), config.min_capacity)


def drop_over_capacity(
    ids_TK: torch.Tensor,
    num_experts: int,
    capacity: int,
    tokens: Tokens,
    layer: int,
    *,
    on_rank: bool = False,
) -> torch.Tensor:
    """Replace by -1 what comes too late for its expert, counting over all ranks' tokens or on this rank."""
    num_choices = ids_TK.shape[1]
    counts_KE = torch.stack([count_experts(ids_TK[:, k], num_experts) for k in range(num_choices)])
    if on_rank:
        counts_PKE, index = counts_KE[None], 0
    else:
        counts_PKE = tokens.gather(counts_KE, f"exchange of capacity counts, layer {layer}").get()
        index = tokens.group.index
    earlier_KE = counts_PKE.sum(0).cumsum(0) - counts_PKE.sum(0)  # all first choices before any second
    earlier_KE = earlier_KE + counts_PKE[:index].sum(0)
    kept = []
    for k in range(num_choices):
        ids_T = ids_TK[:, k]
        place_T = earlier_KE[k][ids_T.clamp(min=0)] + rank_among_equals(ids_T)
        kept.append(torch.where(place_T < capacity, ids_T, -1))
    return torch.stack(kept, dim=1)


def drop_low_scores(ids_TK: torch.Tensor, scores_TK: torch.Tensor, capacity: int) -> torch.Tensor:
    """Replace by -1 what has a lower score than `capacity` others of its expert; of equals, the later."""
    order_N = order_of(scores_TK)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = rank_among_equals(ids_TK.flatten()[order_N])
    return torch.where(place_N.view_as(ids_TK) < capacity, ids_TK, -1)
