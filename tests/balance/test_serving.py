"""Shadows that serve other ranks: few copies, even ranks, and the same answer as its seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.balance.lending import lend_costs
from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.serving import choose_serving, time_of, with_guests
from moeclipse.balance.shadow import choose_shadows
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.balance.workloads import SharedLayer, counts

COSTS = ShadowCosts(
    row_forward=1.0,
    row_backward=2.0,
    row_send=0.01,
    parameter_bytes=1.0,
    gradient_bytes=2.0,
    parameter_byte=1.0,
    gradient_byte=1.0,
    overlap=0.0,
)


def test_a_hot_expert_spills_over_to_a_rank_with_room() -> None:
    counts_PE = np.array([[30, 1, 1, 1]] * 4)
    placement = Placement.contiguous(4, 4)
    plan = choose_serving(counts_PE, placement, COSTS)
    assert plan.serving
    assert [expert for expert, _ in plan.shadows] == [0]
    assert plan.after.total < 0.5 * plan.before.total
    guests = with_guests(placement, plan.shadows)
    split = split_rows(counts_PE, ReplicaTable.of(guests))
    assert split.load_P.max() <= 1.2 * split.load_P.mean()
    assert plan.after == time_of(split, placement, plan.shadows, COSTS, None)


def test_fewer_copies_than_shadows_for_own_rows_alone() -> None:
    """A quarter of 16 ranks could help; each of the others would have to hold a copy for its own rows."""
    shape = SharedLayer(num_experts=16, top_k=1, num_ranks=16, tokens=256)
    counts_PE = counts("hot experts", 1, 0, shape)
    placement = Placement.contiguous(16, 16)
    costs = replace(COSTS, parameter_bytes=20.0, gradient_bytes=40.0)
    serving, alone = choose_serving(counts_PE, placement, costs), choose_shadows(counts_PE, placement, costs)
    copies = [sum(len(ranks) for _, ranks in plan.shadows) for plan in (serving, alone)]
    assert copies[0] < copies[1]
    assert serving.after.total < alone.after.total


def test_nothing_is_lent_where_that_does_not_pay() -> None:
    placement = Placement.contiguous(4, 4)
    for counts_PE, costs in (
        (np.full((4, 4), 9), COSTS),
        (np.zeros((4, 4), dtype=int), COSTS),
        (np.array([[30, 1, 1, 1]] * 4), replace(COSTS, parameter_bytes=1e6)),
    ):
        plan = choose_serving(counts_PE, placement, costs)
        assert (plan.shadows, plan.serving, plan.gain) == ((), False, 0.0)


def test_seconds_without_loans_are_those_of_the_objective() -> None:
    costs = PlacementCosts.from_shapes(d_model=64, d_ff=64)
    counts_PE = np.array([[30, 1, 5, 1], [3, 8, 1, 1], [0, 0, 0, 0], [4, 4, 4, 4]])
    placement = Placement.contiguous(4, 4)
    plan = choose_serving(counts_PE, placement, lend_costs(costs, 1, (0,) * 4))
    assert plan.before.total == pytest.approx(score(placement, counts_PE, costs).total)


def test_far_copies_count_as_what_they_take() -> None:
    counts_PE = np.array([[30, 1, 1, 1]] * 4)
    placement = Placement.contiguous(4, 4)
    near = choose_serving(counts_PE, placement, replace(COSTS, far=4.0), node_P=(0, 0, 0, 0))
    far = choose_serving(counts_PE, placement, replace(COSTS, far=4.0), node_P=(0, 0, 1, 1))
    assert far.after.forward_wire > near.after.forward_wire


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 6), experts=st.integers(1, 9))
def test_any_counts(data: st.DataObject, ranks: int, experts: int) -> None:
    rows = st.lists(st.integers(0, 40), min_size=experts, max_size=experts)
    counts_PE = np.array([data.draw(rows) for _ in range(ranks)])
    if ranks > experts:
        return
    placement = Placement.contiguous(experts, ranks)
    plan = choose_serving(counts_PE, placement, COSTS)
    for expert, borrowers in plan.shadows:
        assert borrowers == tuple(sorted(set(borrowers)))
        assert not set(borrowers) & set(placement.holders[expert])
    guests = with_guests(placement, plan.shadows)
    split = split_rows(counts_PE, ReplicaTable.of(guests))
    assert split.rows_PR.sum() == counts_PE.sum(), "every row has one holder"
    assert plan.after.total <= plan.before.total
    assert choose_serving(counts_PE, placement, COSTS) == plan
