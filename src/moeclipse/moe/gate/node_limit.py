"""The topology-aware gate: at most a share of a rank's rows leaves its node.

    rows      all (token, expert) choices of this rank that are in use, first and later choices alike
    leaving   those whose expert lives on another node
    limit     floor(gate.max_leaving x rows), in whole numbers: 0.29 of 100 rows are 29

Where more would leave, the best-scored ones up to the limit do; equal ones (which, `moe/gate/routing` says)
go by token, then by choice. What happens to the others is `gate.excess`: "drop" marks them unused; "reroute"
sends each to the expert of this node that its token prefers among those that it does not visit yet (a token's
first such row to the best, its second to the next; equal ones by number), and drops it where there is none. A
selection bias counts in that preference, groups of experts do not: they save communication, and a near expert
needs none.

Contract: no expert is visited twice by a token, the limit is never exceeded, and everything stays on the
device: nothing here waits for it.

Hazard: which experts are near depends on the rank, so, unlike all else in a gate, this routing depends on the
layout: another number of nodes, or of ranks per node, trains another model. On one node nothing is limited.
Experts that have shadows for a step count as being where they are owned.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from moeclipse.balance.placement import Placement
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.gate.routing import best_of, order_of

LARGEST_DENOMINATOR = 10**6  # times the number of rows this stays far below 2**63


def near_experts(
    mesh: Mesh, group: Group, placement: Placement, device: torch.device, *, sharded: bool = False
) -> torch.Tensor | None:
    """Whether each expert's primary, where its rows go, is on this rank's node; None where all are.

    Where experts are sharded over tp, the tp ranks share their tokens and must route alike: then an expert
    is near if all of its shards are near the tp rank that talks to them.
    """
    hosts, me = mesh.hosts, group.ranks[group.index]
    shifts = range(-mesh.tp_index, mesh.tp - mesh.tp_index) if sharded else (0,)
    near = [
        all(hosts[me + shift] == hosts[group.ranks[rank] + shift] for shift in shifts)
        for rank in placement.primary
    ]
    return None if all(near) else torch.tensor(near, device=device)


def limit_leaving(
    ids_TK: torch.Tensor,
    scores_TK: torch.Tensor,
    preference_TE: torch.Tensor,
    near_E: torch.Tensor,
    *,
    share: float,
    reroute: bool,
) -> torch.Tensor:
    """`ids_TK` with what may not leave replaced: by another expert of this node, or by -1."""
    used_TK = ids_TK >= 0
    leaves_TK = used_TK & ~near_E[ids_TK.clamp(min=0)]
    part = Fraction(repr(float(share))).limit_denominator(LARGEST_DENOMINATOR)
    limit = used_TK.sum() * part.numerator // part.denominator
    order = order_of(scores_TK.detach().masked_fill(~leaves_TK, -math.inf))
    first = torch.empty_like(order, dtype=torch.bool)
    first[order] = torch.arange(len(order), device=order.device) < limit
    excess_TK = leaves_TK & ~first.view_as(leaves_TK)
    kept_TK = ids_TK.masked_fill(excess_TK, -1)
    return _reroute(kept_TK, excess_TK, preference_TE, near_E) if reroute else kept_TK


def _reroute(
    kept_TK: torch.Tensor, excess_TK: torch.Tensor, preference_TE: torch.Tensor, near_E: torch.Tensor
) -> torch.Tensor:
    num_tokens, num_experts = preference_TE.shape
    # Unused places mark an extra expert that nobody is.
    visited_TE = near_E.new_zeros(num_tokens, num_experts + 1)
    visited_TE.scatter_(1, torch.where(kept_TK >= 0, kept_TK, num_experts), True)
    open_TE = near_E & ~visited_TE[:, :num_experts]
    ranked_TE = preference_TE.detach().masked_fill(~open_TE, -math.inf)
    best_TE = best_of(ranked_TE, min(excess_TK.shape[1], num_experts))
    nth_TK = excess_TK.cumsum(1) - 1
    found_TK = best_TE.gather(1, nth_TK.clamp(min=0))
    moves_TK = excess_TK & (nth_TK < open_TE.sum(1, keepdim=True))
    return torch.where(moves_TK, found_TK, kept_TK)
