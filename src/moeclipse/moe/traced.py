"""Experts inside `torch.compile`: on one rank a graph without a break."""

from __future__ import annotations

import torch

from moeclipse.moe.autocast import rows_for
from moeclipse.moe.experts import Experts
from moeclipse.moe.fused import visit_all
from moeclipse.moe.routing import Routing
from moeclipse.moe.shared import shared_expert
from moeclipse.moe.shared_gate import GatedShared


def visit_traced(
    x_TD: torch.Tensor, routing: Routing, experts: Experts, shared: Experts | GatedShared | None
) -> torch.Tensor:
    rows_TD = rows_for(x_TD, experts.up)
    y_TD = visit_all(experts, rows_TD, routing.scores_TK, routing.expert_ids_TK, sums=False)
    return y_TD if shared is None else y_TD + shared_expert(rows_TD, shared)
