"""What planners are asked: refused where it makes no sense, and judged by one record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import COSTS, FREE, asked, problems
from strategies import zipf_counts

from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.problem import fitted, packed
from moeclipse.balance.replicate import plan_random
from moeclipse.core.errors import ConfigError

CHEAP_ROWS = replace(COSTS, row_seconds=COSTS.row_seconds / 100)
SHARED = replace(CHEAP_ROWS, shared_wire=True)


def test_tiers_begin_with_what_will_do_and_end_with_all() -> None:
    problem = asked(np.ones((4, 10)), (4, 2, 6, 0), Placement.parse([[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], []]))
    assert problem.tiers == ((4, 2, 4, 0), (4, 2, 5, 0), (4, 2, 6, 0))
    large = asked(np.ones((4, 300)), (90,) * 4, Placement.contiguous(300, 4))
    assert large.tiers == ((90,) * 4,), "a large table is filled at its full size only"


def test_the_judge_is_the_objective() -> None:
    counts_PE, current = zipf_counts(4, 8, 1.0), Placement.contiguous(8, 4)
    problem = asked(counts_PE + 0.25, (3,) * 4, current, COSTS)
    table = Placement.parse([[0, 1, 2], [2, 3, 0], [4, 5, 0], [6, 7, 0]])
    expected = score(table, counts_PE, COSTS, current=current, expected_E=problem.load_E)
    assert problem.judge(table) == expected
    assert problem.bound < expected.total
    moved = COSTS.every * (problem.move_seconds + problem.state_seconds)
    assert moved == pytest.approx(COSTS.move_seconds(1, 1))
    assert 2 * problem.copy_seconds == pytest.approx(COSTS.sync_seconds(2.0))


def test_an_expert_is_spread_over_no_more_ranks_than_slots_are_left_for() -> None:
    """More than half of all rows go to one of 4 experts: on 4 ranks, with 0, 1 and 3 spare slots."""
    counts_PE = np.array([[96, 16, 16, 16]] * 4)
    for slots_P, parts in (((1, 1, 1, 1), 1), ((2, 1, 1, 1), 2), ((2, 2, 2, 1), 4)):
        current = fitted(Placement.contiguous(4, 4), slots_P)
        problem = asked(counts_PE, slots_P, current)
        assert problem.bound == max(96 * 4 / parts, 144)
        assert replace(problem, lends=True).bound == 144, "who lends it needs no slot"
    assert (
        asked(counts_PE, (1, 1, 1, 1), Placement.contiguous(4, 4)).judge(Placement.contiguous(4, 4)).total
        == 384
    )


@settings(deadline=None, max_examples=40)
@given(problems(), st.integers(0, 99))
def test_no_placement_keeps_more_rows_at_home_than_could_stay(
    problem: tuple[np.ndarray, tuple[int, ...]], seed: int
) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    wanted = asked(counts_PE, slots_P, current)
    assert wanted.could_stay >= 1 - wanted.judge(current).sent_share - 1e-9


FIXED = replace(CHEAP_ROWS, replicas_seconds=100 * CHEAP_ROWS.row_seconds)


@pytest.mark.parametrize(("fixed", "apart"), [(0.0, False), (30.0, False), (300.0, True)])
def test_the_bound_pays_for_replicas_once(fixed: float, apart: bool) -> None:
    """Rows of both ranks want both experts: copies save their way, and are taken as long as that pays."""
    costs = replace(
        FREE, row_bytes=1.0, near_bandwidth=1.0, weight_bytes=3.0, gradient_bytes=7.0, replicas_seconds=fixed
    )
    problem = asked(np.full((2, 2), 20), (2, 2), Placement.parse([[0], [1]]), costs)
    best = problem.judge(Placement.parse([[0, -1], [1, -1]] if apart else [[0, 1], [1, 0]])).total
    migration = 0.0 if apart else problem.judge(Placement.parse([[0, 1], [1, 0]])).migration
    assert problem.bound == pytest.approx(best - migration)


@settings(deadline=None, max_examples=40)
@given(problems(), st.integers(0, 99), st.sampled_from([COSTS, CHEAP_ROWS, SHARED, FIXED]), st.integers(1, 2))
def test_no_placement_is_below_the_bound(
    problem: tuple[np.ndarray, tuple[int, ...]], seed: int, costs: PlacementCosts, nodes: int
) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    node_P = tuple(rank % nodes for rank in range(len(slots_P)))
    wanted = replace(asked(counts_PE, slots_P, current, costs), node_P=node_P)
    for planner in ("greedy", "incremental"):
        found = plan(PlanConfig(planner=planner), counts_PE.astype(float), slots_P, current, costs, node_P)
        assert wanted.judge(found).total >= wanted.bound * (1 - 1e-9)
    assert wanted.judge(current).total >= wanted.bound * (1 - 1e-9)


def test_the_bound_is_reached_where_nothing_can_be_better() -> None:
    """Every rank sends to its own experts alone: no row travels, and no replica would keep one more."""
    counts_PE = np.kron(np.eye(4), np.full((1, 2), 500.0))
    problem = asked(counts_PE, (3,) * 4, Placement.contiguous(8, 4), COSTS)
    assert problem.judge(problem.current).total == pytest.approx(problem.bound, rel=1e-12)


def test_what_holds_now_gets_all_slots() -> None:
    problem = asked(np.ones((2, 3)), (3, 2), Placement.parse([[0, 1], [2]]))
    assert problem.start.slots == ((0, 1, EMPTY), (2, EMPTY))
    assert fitted(problem.current, (2, 1)) == problem.current


def test_a_search_begins_with_experts_in_order() -> None:
    table = Placement.parse([[EMPTY, 2, 0], [1, EMPTY, 2]])
    found = packed(table, (3, 2))
    assert found is not None
    assert found.slots == ((0, 2, EMPTY), (1, 2))
    assert found.primary == table.primary
    assert packed(table, (2, 1)) is None, "an expert would be lost"


def test_a_tier_is_judged_by_its_own_slots() -> None:
    wanted = replace(asked(zipf_counts(2, 4, 1.0), (4, 4), Placement.contiguous(4, 2), COSTS), turnover=0.1)
    fewer = asked(zipf_counts(2, 4, 1.0), (3, 3), Placement.contiguous(4, 2), COSTS)
    tier = replace(wanted, tier=(3, 3))
    assert (tier.num_slots, tier.bound) == (6, fewer.bound)
    assert tier.turnover_seconds == replace(fewer, turnover=0.1).turnover_seconds > wanted.turnover_seconds


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems") as told:
        asked(np.full((2, 4), np.nan), (1, 9), Placement.contiguous(4, 2))
    assert "not finite" in str(told.value)
    assert "rank 0 has 2 slots now, but only 1 in the plan; give it 2" in str(told.value)
    with pytest.raises(ConfigError, match="slots are given for 3 ranks"):
        asked(np.ones((2, 4)), (2, 2, 2), Placement.contiguous(4, 2))


def test_nodes_are_counted_by_name() -> None:
    problem = replace(asked(np.ones((3, 4)), (2,) * 3, Placement.contiguous(4, 3), FREE), node_P=(7, 3, 7))
    assert (problem.num_nodes, problem.node_index.tolist()) == (2, [1, 0, 1])
    assert problem.rows_NE.tolist() == [[1, 1, 1, 1], [2, 2, 2, 2]]
