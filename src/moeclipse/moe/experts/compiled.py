"""Experts inside `torch.compile`: on one rank a graph without a break."""

from __future__ import annotations

import torch

from moeclipse.moe.experts.fused import visit_all
from moeclipse.moe.experts.shared import shared_expert
from moeclipse.moe.experts.shared_gate import GatedShared
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.tokens import rows_for


def visit_traced(
    x_TD: torch.Tensor, routing: Routing, experts: Experts, shared: Experts | GatedShared | None
) -> torch.Tensor:
    rows_TD = rows_for(x_TD, experts.like)
    y_TD = visit_all(experts, rows_TD, routing.scores_TK, routing.expert_ids_TK, sums=False)
    return y_TD if shared is None else y_TD + shared_expert(rows_TD, shared)
