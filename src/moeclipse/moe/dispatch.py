"""Rows to their experts and back: counts first, then rows, nothing padded.

A *pair* is one (token, expert) choice; a *row* is a token's vector on its way to a rank. When several of a
token's experts live on one rank, its vector travels there once, and one partial sum returns: N rows, not
one for each pair. Beside the rows travel, for each pair, the place of its row and its score (8 bytes).

    sender     pairs sorted by (rank, expert, token)      rows sorted by (rank, token)
    round 1    [pairs for each expert, rows for each rank]  from everyone to everyone
    round 2    rows and pairs
    receiver   pairs regrouped by (expert, source rank, token): what the experts compute on

The regrouping keeps global token order inside an expert, so sums do not depend on the layout. The plan is
made once, in forward; backward runs over the same plan. All sizes come to the host in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeclipse.balance.placement import Placement
from moeclipse.comm.exchange import Result, all_to_all, gather
from moeclipse.comm.lane import Lane
from moeclipse.comm.mesh import Group
from moeclipse.ops.combine import sum_rows


@dataclass(frozen=True, kw_only=True)
class Route:
    """A placement as tensors on the device, and the ranks that share it."""

    placement: Placement
    rank_of_E: torch.Tensor
    slot_of_E: torch.Tensor
    group: Group
    lane: Lane

    @classmethod
    def of(cls, placement: Placement, group: Group, lane: Lane, device: torch.device) -> Route:
        return cls(
            placement=placement,
            rank_of_E=torch.tensor(placement.rank_of, device=device),
            slot_of_E=torch.tensor(placement.slot_of, device=device),
            group=group,
            lane=lane,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who sends what to whom. N rows and n pairs are sent; R rows and M pairs arrive."""

    route: Route
    where: str
    num_tokens: int
    row_token_N: torch.Tensor
    pair_place_n: torch.Tensor
    """Of each pair sent, its place in the flattened (token, choice) table."""
    pair_row_n: torch.Tensor
    """Of each pair sent, its row counted from the first row sent to the same rank."""
    send_rows: list[int]
    receive_rows: list[int]
    send_pairs: list[int]
    receive_pairs: list[int]
    counts: list[int]
    """Pairs for each expert of this rank."""
    regroup_M: torch.Tensor
    """From arrival order (source, expert, token) to expert order."""
    row_start_M: torch.Tensor
    """Of each pair that arrives, the first row of its source."""

    def send(self, rows_ND: torch.Tensor, what: str) -> Result:
        label = f"{what}, {self.where}"
        return all_to_all(
            self.route.lane, self.route.group, rows_ND, self.send_rows, self.receive_rows, label
        )

    def send_back(self, rows_RD: torch.Tensor, what: str) -> Result:
        label = f"{what}, {self.where}"
        return all_to_all(
            self.route.lane, self.route.group, rows_RD, self.receive_rows, self.send_rows, label
        )

    def sum_tokens(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """The partial sums that came back, added for each token in rank order."""
        return sum_rows(rows_ND, self.row_token_N, self.num_tokens)


def plan_dispatch(expert_ids_TK: torch.Tensor, route: Route, where: str) -> Plan:
    num_tokens, top_k = expert_ids_TK.shape
    num_ranks, num_experts = route.group.size, route.placement.num_experts
    device = expert_ids_TK.device
    flat_ids = expert_ids_TK.flatten()
    used = flat_ids >= 0
    slots = torch.where(used, route.slot_of_E[flat_ids.clamp(min=0)], num_experts)
    ranks = route.rank_of_E[flat_ids.clamp(min=0)]
    tokens = torch.arange(num_tokens, device=device).repeat_interleave(top_k)

    # Unused places mark an extra rank that nobody is.
    sent_PT = torch.zeros(num_ranks + 1, num_tokens, dtype=torch.bool, device=device)
    sent_PT[torch.where(used, ranks, num_ranks), tokens] = True
    sent_PT = sent_PT[:num_ranks]
    row_of_PT = sent_PT.cumsum(1) - 1
    pairs_E = torch.bincount(slots, minlength=num_experts + 1)[:num_experts]
    sizes = torch.cat([pairs_E, sent_PT.sum(1)])
    everyone = gather(route.lane, route.group, sizes, f"exchange of sizes, {where}")

    # Local sorting runs while the sizes travel.
    order = slots.argsort(stable=True)
    row_token_N = sent_PT.nonzero()[:, 1]
    table = everyone.to_host()

    me = route.group.index
    bounds = [0]
    for experts in route.placement.slots:
        bounds.append(bounds[-1] + len(experts))
    send_pairs = [sum(table[me][bounds[p] : bounds[p + 1]]) for p in range(num_ranks)]
    arriving = [source[bounds[me] : bounds[me + 1]] for source in table]  # [source][my expert]
    receive_rows = [source[num_experts + me] for source in table]
    receive_pairs = [sum(counts) for counts in arriving]
    counts = [sum(counts) for counts in zip(*arriving, strict=True)]
    order = order[: sum(send_pairs)]

    num_mine = len(counts)
    my_experts = torch.arange(num_mine, device=device).repeat(num_ranks)
    expert_M = my_experts.repeat_interleave(
        torch.tensor(arriving, dtype=torch.int64, device=device).flatten()
    )
    starts = torch.tensor([sum(receive_rows[:p]) for p in range(num_ranks)], device=device)
    return Plan(
        route=route,
        where=where,
        num_tokens=num_tokens,
        row_token_N=row_token_N,
        pair_place_n=order,
        pair_row_n=row_of_PT[ranks[order], tokens[order]],
        send_rows=table[me][num_experts:],
        receive_rows=receive_rows,
        send_pairs=send_pairs,
        receive_pairs=receive_pairs,
        counts=counts,
        regroup_M=expert_M.argsort(stable=True),
        row_start_M=starts.repeat_interleave(torch.tensor(receive_pairs, device=device)),
    )


def send_pairs(plan: Plan, scores_TK: torch.Tensor) -> Result:
    """Row places and scores, bit-packed side by side in the scores' own type."""
    integer = torch.int64 if scores_TK.dtype == torch.float64 else torch.int32
    places = plan.pair_row_n.to(integer).view(scores_TK.dtype)
    packed = torch.stack([places, scores_TK.flatten()[plan.pair_place_n]], dim=1)
    route = plan.route
    return all_to_all(
        route.lane,
        route.group,
        packed,
        plan.send_pairs,
        plan.receive_pairs,
        f"dispatch of scores, {plan.where}",
    )


def unpack_pairs(plan: Plan, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_M, score_M) in expert order."""
    integer = torch.int64 if packed.dtype == torch.float64 else torch.int32
    row_M = packed[:, 0].contiguous().view(integer).to(torch.int64) + plan.row_start_M
    return row_M[plan.regroup_M], packed[:, 1][plan.regroup_M]


def return_score_grads(plan: Plan, d_score_M: torch.Tensor) -> Result:
    """Score gradients back to the ranks whose gate gave the scores, in the order the pairs were sent."""
    arrival = torch.empty_like(d_score_M)
    arrival[plan.regroup_M] = d_score_M
    route = plan.route
    return all_to_all(
        route.lane,
        route.group,
        arrival,
        plan.receive_pairs,
        plan.send_pairs,
        f"return of score gradients, {plan.where}",
    )
