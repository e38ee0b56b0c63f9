"""Experts inside `torch.compile`: on one rank a graph without a break."""

from __future__ import annotations

import torch

from moeclipse.moe.autocast import rows_for
from moeclipse.moe.experts import Experts
from moeclipse.moe.routing import Routing
from moeclipse.moe.shared import shared_expert
from moeclipse.moe.shared_gate import GatedShared
from moeclipse.ops.grouped_experts import grouped_experts


def visit_traced(
    x_TD: torch.Tensor, routing: Routing, experts: Experts, shared: Experts | GatedShared | None
) -> torch.Tensor:
    rows_TD = rows_for(x_TD, experts.up)
    weights = [weight.to(rows_TD.dtype) for weight in experts.weights]
    given = (rows_TD, routing.scores_TK, routing.expert_ids_TK, *weights)
    y_TD = grouped_experts(*given, activation=experts.activation)
    return y_TD if shared is None else y_TD + shared_expert(rows_TD, shared)
