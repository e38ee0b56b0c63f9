"""Dynamic gates: each token decides how many of its `gate.top_k` best experts it visits.

A gate ranks a token's experts; place 0 is the best one and is always used. With p_k, the probability of the
expert at place k (over all experts they sum to one), `gate.choose` decides about the other places:

    gap         p_0 - p_k <= limit               experts far behind the best one are left out
    top_p       p_0 + ... + p_(k-1) < limit      the fewest experts whose probabilities reach the limit
    threshold   p_k >= limit                     experts with little probability are left out

Two limits move, once a step, by numbers that were summed over all ranks and microbatches of the step:

    gap                       limit += gap_rate * (gap_factor * mean of |p_0 - p_1| - limit)
    top_p with mean_experts   missing = mean_rate * (mean_experts - mean experts) / (top_k - 1)
                              trend += TREND_RATE * missing, of which at most 0.05 count
                              logit(limit) += missing + trend

A gate that grows surer of itself from step to step needs a limit that moves steadily: without the trend, the
limit would follow late, and the mean would lie a few per cent off for as long as the gate drifts.

Contract. Which places are used is decided without gradient; scores of unused places are zero and take no
part in renormalising. The sums are whole numbers (gaps in units of 2^-30), so a limit depends neither on the
layout of ranks nor on the order of additions, and all ranks hold the same bits. Limits that move are buffers
and are saved in checkpoints.

Shapes: T tokens, K = gate.top_k places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from moeclipse.moe.config import GateConfig
from moeclipse.moe.private_torch import NO_BACKWARD, running_backward

BORN_LATER = "dynamic.trend"
"""A buffer that checkpoints of the first release do not have: it begins at rest."""
GAP_UNIT = 2.0**-30
MAX_LOGIT = 15.0
"""The last limits that probabilities in float32 tell from one (1 - 3e-7): a gate that is sure of itself needs
them. A controller whose goal is out of reach (`train/run/metrics`) must find its way back from here."""
TREND_RATE = 0.05  # slow beside the controller itself, or they would swing
MOST_LEARNED = 0.05  # a limit that is far off is on its way, which is no trend


def places_in_use_reference(share_TK: torch.Tensor, choose: str, limit: float) -> torch.Tensor:
    """The table above, token by token and place by place."""
    used = []
    for shares in share_TK.tolist():
        row, before = [], 0.0
        for place, share in enumerate(shares):
            keeps = {
                "gap": shares[0] - share <= limit,
                "top_p": before < limit,
                "threshold": share >= limit,
            }[choose]
            row.append(place == 0 or keeps)
            before += share
        used.append(row)
    return torch.tensor(used, dtype=torch.bool).view(share_TK.shape)


def places_in_use(share_TK: torch.Tensor, choose: str, limit: torch.Tensor | float) -> torch.Tensor:
    if choose == "gap":
        used_TK = share_TK[:, :1] - share_TK <= limit
    elif choose == "top_p":
        used_TK = share_TK.cumsum(1) - share_TK < limit
    else:
        used_TK = share_TK >= limit
    used_TK[:, 0] = True
    return used_TK


def renormalise_used(scores_TK: torch.Tensor, used_TK: torch.Tensor) -> torch.Tensor:
    """Scores of the used places, divided by their sum."""
    scores_TK = scores_TK * used_TK
    single_T1 = used_TK.sum(1, keepdim=True) == 1
    shared_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + 1e-20)
    # Alone, a score is s / s: its gradient is zero, not what rounding leaves of it.
    return torch.where(single_T1, used_TK.to(scores_TK.dtype), shared_TK)


class DynamicChoice(nn.Module):
    """How many experts a token visits, and the limit that decides it."""

    limit: torch.Tensor
    trend: torch.Tensor
    """By how much logit(limit) moves at each step while nothing is missing."""
    seen_3: torch.Tensor
    """Of this rank since the last step: tokens, rows, gaps. Ratios count, so tokens may be seen twice."""

    def __init__(self, config: GateConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        limit = torch.empty((), dtype=torch.float64, device=device)
        self.register_buffer("limit", limit, persistent=self.moves)
        trend = torch.empty((), dtype=torch.float64, device=device)
        self.register_buffer("trend", trend, persistent=config.mean_experts > 0)
        seen_3 = torch.empty(3, dtype=torch.int64, device=device)
        self.register_buffer("seen_3", seen_3, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As at the start: the limit as the configuration says, nothing seen."""
        self.limit.fill_(self.config.top_p if self.config.choose == "top_p" else self.config.threshold)
        self.trend.zero_()
        self.seen_3.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *rest: object) -> None:
        """States of the first release know no trend: it begins at rest."""
        if self.config.mean_experts > 0 and f"{prefix}limit" in state_dict:
            state_dict.setdefault(f"{prefix}trend", torch.zeros_like(self.trend))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DynamicChoice:
        """Limit and trend stay in float64, whatever type the model is cast to."""
        before = self.limit, self.trend
        super()._apply(fn, recurse)
        if self.limit.dtype != before[0].dtype:
            self.limit, self.trend = (kept.to(self.limit.device) for kept in before)
        return self

    @property
    def moves(self) -> bool:
        return self.config.choose == "gap" or self.config.mean_experts > 0

    @torch.no_grad()
    def forward(self, share_TK: torch.Tensor) -> torch.Tensor:
        """Which places are used, [T, K]."""
        # A limit of the shares' type: a comparison must not depend on what the other side is widened to.
        used_TK = places_in_use(share_TK, self.config.choose, self.limit.to(share_TK.dtype))
        if self.training and (torch.compiler.is_compiling() or running_backward() == NO_BACKWARD):
            gap_T = (share_TK[:, 0] - share_TK[:, 1]).abs().double()
            gaps = (gap_T / GAP_UNIT).round().sum().to(torch.int64)
            tokens = torch.full_like(gaps, len(share_TK))
            self.seen_3 += torch.stack([tokens, used_TK.sum(), gaps])
        return used_TK

    def take_seen(self) -> torch.Tensor:
        """What this rank saw since it was last asked."""
        seen_3 = self.seen_3.clone()
        self.seen_3.zero_()
        return seen_3

    @torch.no_grad()
    def adapt(self, global_seen_3: torch.Tensor) -> None:
        """Once a step, with the sums over all ranks."""
        if not self.moves:
            return
        tokens, rows, gaps = global_seen_3.to(self.limit).unbind()
        if self.config.choose == "gap":
            goal = self.config.gap_factor * GAP_UNIT * gaps / tokens
            moved = self.limit + self.config.gap_rate * (goal - self.limit)
        else:
            off = (self.config.mean_experts - rows / tokens) / (self.config.top_k - 1)
            missing = self.config.mean_rate * off
            trend = self.trend + TREND_RATE * missing.clamp(-MOST_LEARNED, MOST_LEARNED)
            logit = torch.logit(self.limit) + missing + trend
            moved = torch.sigmoid(logit.clamp(-MAX_LOGIT, MAX_LOGIT))
            # At its end a limit does not move: a trend that went on would have to be undone first.
            trend = torch.where(logit.abs() < MAX_LOGIT, trend, 0.0)
            self.trend.copy_(torch.where(tokens > 0, trend, self.trend))
        self.limit.copy_(torch.where(tokens > 0, moved, self.limit))
