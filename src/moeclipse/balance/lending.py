"""Lent for a step or copied for long: shadows in the seconds of the objective.

Idea: a shadow (`balance/shadow`) and a replica do the same for a row, which stays where it is. A shadow costs
its parameters and its gradients in every call of the layer and holds no slot; a replica costs gradients and
weights once a step, a slot, and the way there. With both in the same seconds (`balance/objective`) a planner
that is told of shadows copies what stays hot, and leaves what is hot for a moment to be lent.

Contract: pure. The prices are those of `PlacementCosts`, compute and wire one after the other, so a layer
without shadows costs here what the objective says.

Planners count on `lent`, shadows for the rows of their own rank, which every layer can have: `lent_now` takes
twice as long, and what serves others depends on the rows of a step.

Hazard: what training then lends is decided in each call from that call's rows (`moe/tune/exchange_policy`),
with the overlap that its schedule has. This is what a plan can count on, not what will be lent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import ShadowPlan, choose_shadows
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.shadow_policy import ShadowQuestion
from moeclipse.balance.split import ReplicaTable

FORWARD = 1 / 3
"""Of a row's seconds; what lies in backward, two products for one, does not matter to their sum."""


def lend_costs(costs: PlacementCosts, calls: int, node_P: Sequence[int] = (0,)) -> ShadowCosts:
    """Prices of a step in which the layer is called so often, its rows added up."""
    byte = 1 / costs.bandwidth(node_P)
    if costs.shared_wire:
        byte /= len(node_P)  # the model adds the bytes of all ranks up
    return ShadowCosts(
        row_forward=FORWARD * costs.row_seconds,
        row_backward=(1 - FORWARD) * costs.row_seconds,
        row_send=costs.row_bytes * byte,
        parameter_bytes=costs.weight_bytes,
        gradient_bytes=costs.gradient_bytes,
        parameter_byte=calls * byte,
        gradient_byte=calls * byte,
        copy=calls * costs.loan_seconds,
        overlap=0.0,
        shared_wire=costs.shared_wire,
    )


def lent_now(
    placement: Placement,
    rows_PE: np.ndarray,
    costs: PlacementCosts,
    *,
    calls: int,
    node_P: Sequence[int],
    expected_E: np.ndarray | None = None,
) -> ShadowPlan:
    """The same with shadows that may serve other ranks, too: what training lends with these rows at hand."""
    return ShadowQuestion(
        counts_PE=rows_PE,
        rows_PE=rows_PE,
        placement=placement,
        costs=lend_costs(costs, calls, node_P),
        node_P=tuple(node_P),
        table=ReplicaTable.of(placement, expected_E),
        may_serve=True,
    ).best()


def lent(
    placement: Placement,
    rows_PE: np.ndarray,
    costs: PlacementCosts,
    *,
    calls: int,
    node_P: Sequence[int],
    expected_E: np.ndarray | None = None,
) -> ShadowPlan:
    """What would be lent of a placement, and what that saves of a step."""
    return choose_shadows(
        rows_PE,
        placement,
        lend_costs(costs, calls, node_P),
        node_P=node_P,
        table=ReplicaTable.of(placement, expected_E),
    )
