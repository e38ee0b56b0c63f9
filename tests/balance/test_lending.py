"""Shadows in the seconds of the objective: the same layer costs the same, and what is lent is not copied."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import COSTS, problems
from strategies import zipf_counts

from moeclipse.balance.lending import lend_costs, lent
from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, answer
from moeclipse.balance.problem import PlanProblem
from moeclipse.balance.replicate import plan_random
from moeclipse.balance.shadow import predict

SHARED = replace(COSTS, shared_wire=True)


@pytest.mark.parametrize("costs", [COSTS, SHARED])
@pytest.mark.parametrize("calls", [1, 8])
def test_a_layer_without_shadows_costs_what_the_objective_says(costs: PlacementCosts, calls: int) -> None:
    counts_PE = zipf_counts(4, 8, 1.2)
    placement = Placement.parse([[0, 1, 2], [2, 3, 0], [4, 5, 0], [6, 7, 0]])
    found = predict(counts_PE, placement, lend_costs(costs, calls, (0,) * 4), ())
    told = score(placement, counts_PE, costs)
    assert found.total == pytest.approx(told.fullest + told.near, rel=1e-12)


def test_a_loan_costs_its_bytes_in_every_call() -> None:
    """One expert to one rank: parameters and gradients over its link, as often as the layer is called."""
    counts_PE, placement = np.array([[10, 0], [10, 0]]), Placement.parse([[0], [1]])
    for calls, loan in ((1, 0.0), (3, 0.0), (3, 2e-3)):
        costs = lend_costs(replace(COSTS, loan_seconds=loan), calls, (0, 0))
        before, after = (predict(counts_PE, placement, costs, s) for s in ((), ((0, (1,)),)))
        kept = 10 * COSTS.row_seconds + 4 * 10 * COSTS.row_bytes / COSTS.near_bandwidth
        sent = calls * (COSTS.weight_bytes + COSTS.gradient_bytes) / COSTS.near_bandwidth
        assert before.total - after.total == pytest.approx(kept - sent - 2 * calls * loan, rel=1e-9)


def asked(counts_PE: np.ndarray, calls: int, lends: bool, costs: PlacementCosts = COSTS) -> PlanProblem:
    num_ranks, num_experts = counts_PE.shape
    return PlanProblem(
        counts_PE=counts_PE,
        slots_P=(num_experts // num_ranks + 1,) * num_ranks,
        current=Placement.contiguous(num_experts, num_ranks),
        costs=costs,
        lends=lends,
        calls=calls,
    )


def test_what_is_lent_is_not_copied() -> None:
    """A hot expert whose move is dear: lent where the layer is called once a step, else copied for long."""
    counts_PE = np.full((2, 8), 500.0)
    counts_PE[:, 0] = 40000.0
    dear = replace(COSTS, every=2)
    auto = PlanConfig(planner="auto")
    alone = asked(counts_PE, 1, False, dear)
    copied = answer(auto, alone)
    assert copied.num_replicas > 8
    once = asked(counts_PE, 1, True, dear)
    assert answer(auto, once) is once.current
    shadows = lent(once.current, counts_PE.astype(np.int64), dear, calls=1, node_P=once.node_P).shadows
    assert [expert for expert, _ in shadows][:1] == [0]
    often = asked(counts_PE, 64, True, dear)
    assert answer(auto, often).num_replicas > 8


def test_a_plan_counts_on_loans_only_where_training_lends() -> None:
    counts_PE = zipf_counts(4, 8, 1.5, tokens=32768).astype(float)
    problem = asked(counts_PE, 1, False)
    assert problem.judge(problem.current).lent == 0.0
    lends = replace(problem, lends=True)
    told = lends.judge(problem.current)
    assert told.lent > 0
    assert told.total == pytest.approx(problem.judge(problem.current).total - told.lent)


def test_ranks_without_slots_can_compute_what_is_lent() -> None:
    counts_PE = np.zeros((4, 2))
    counts_PE[2:, 0] = 1e6
    problem = PlanProblem(
        counts_PE=counts_PE,
        slots_P=(1, 1, 0, 0),
        current=Placement.parse([[0], [1], [], []]),
        costs=COSTS,
        lends=True,
    )
    assert problem.judge(problem.current).fullest > problem.judge(problem.current).total >= problem.bound


@settings(deadline=None, max_examples=25)
@given(problems(), st.integers(0, 99), st.sampled_from([1, 4]), st.sampled_from([COSTS, SHARED]))
def test_no_placement_is_below_the_bound_with_loans(
    problem: tuple[np.ndarray, tuple[int, ...]], seed: int, calls: int, costs: PlacementCosts
) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    wanted = PlanProblem(
        counts_PE=counts_PE.astype(float),
        slots_P=slots_P,
        current=current,
        costs=costs,
        lends=True,
        calls=calls,
    )
    found = answer(PlanConfig(planner="auto"), wanted)
    assert wanted.judge(found).total <= wanted.judge(current).total * (1 + 1e-9)
    for placement in (found, current):
        assert wanted.judge(placement).total >= wanted.bound * (1 - 1e-9)
