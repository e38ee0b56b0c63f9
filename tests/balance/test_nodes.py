"""Wrap-fill over nodes: everything fits, ranks are even, and rows stay on their node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from plans import COSTS, check_fits, problems

from moeclipse.balance.draft import Draft
from moeclipse.balance.nodes import plan_two_level, tables_for_nodes
from moeclipse.balance.objective import nodes_of, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, answer
from moeclipse.balance.problem import PlanProblem
from moeclipse.balance.split import ReplicaTable, split_rows


@settings(deadline=None)
@given(problems())
def test_two_levels_fit(problem: tuple[np.ndarray, tuple[int, ...]]) -> None:
    counts_PE, slots_P = problem
    nodes = [rank % 2 for rank in range(len(slots_P))]
    tables = tables_for_nodes(counts_PE, slots_P, nodes)
    for table in (plan_two_level(counts_PE, slots_P, nodes), *tables):
        check_fits(table, counts_PE.shape[1], slots_P)
    spare = sum(min(count, counts_PE.shape[1]) for count in slots_P) - counts_PE.shape[1]
    assert (len(tables) > 0) == (spare > 0)


@pytest.mark.parametrize(
    ("shape", "least"), [((64, 8, 10), 0.999), ((256, 32, 10), 0.99), ((32, 16, 3), 0.97)]
)
def test_wrap_fill_balances_the_next_step(shape: tuple[int, int, int], least: float) -> None:
    num_experts, num_ranks, slots = shape
    rng = np.random.default_rng(0)
    weight = rng.permutation(np.arange(1, num_experts + 1) ** -1.2)
    seen, after = (rng.multinomial(32768, weight / weight.sum(), size=num_ranks) for _ in range(2))
    placement = plan_two_level(seen, (slots,) * num_ranks, [0] * num_ranks)
    split = split_rows(after, ReplicaTable.of(placement, seen.sum(0)))
    assert split.balance >= least
    static = Placement.contiguous(num_experts, num_ranks)
    assert split_rows(after, ReplicaTable.of(static)).balance < 0.5


def test_two_levels_keep_rows_on_their_node() -> None:
    rng = np.random.default_rng(0)
    weight = np.arange(1, 33) ** -1.5
    counts_PE = rng.multinomial(8192, weight / weight.sum(), size=16)
    nodes = nodes_of(16, 2)
    two, flat = (
        score(plan_two_level(counts_PE, (4,) * 16, node_P), counts_PE, COSTS, node_P=nodes)
        for node_P in (nodes, (0,) * 16)
    )
    assert two.balance > 0.97
    assert two.cross_share < 0.15
    assert two.cross_share < flat.cross_share / 1.5


def gate(ranks: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weight = rng.permutation(np.arange(1, 65) ** -1.0)
    return rng.multinomial(8192, weight / weight.sum(), size=ranks)


def test_the_more_slots_hold_experts_of_other_nodes_the_fewer_rows_cross() -> None:
    nodes, counts_PE = nodes_of(16, 4), gate(16)
    shares = [
        score(table, counts_PE, COSTS, node_P=nodes).cross_share
        for table in tables_for_nodes(counts_PE, (6,) * 16, nodes)
    ]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.45  # of 0.75 where experts stand anywhere


def test_sources_that_ask_for_other_experts_get_theirs() -> None:
    nodes, counts_PE = nodes_of(16, 4), np.ones((16, 64), dtype=np.int64)
    for rank, node in enumerate(nodes):
        counts_PE[rank, [16 * node, 16 * ((node + 1) % 4) + 1]] = 1000
    for table in tables_for_nodes(counts_PE, (6,) * 16, nodes):
        for expert, node in ((0, 0), (17, 0), (16, 1), (33, 1), (32, 2), (49, 2), (48, 3), (1, 3)):
            assert node in {nodes[rank] for rank in table.holders[expert]}


@pytest.mark.parametrize("slots", [4, 6])
def test_a_draft_knows_which_rows_cross(slots: int) -> None:
    nodes, counts_PE = nodes_of(16, 4), gate(16)
    problem = PlanProblem(
        counts_PE=counts_PE,
        slots_P=(slots,) * 16,
        current=Placement.contiguous(64, 16),
        costs=COSTS,
        node_P=nodes,
    )
    table = problem.start if slots == 4 else tables_for_nodes(counts_PE, (slots,) * 16, nodes)[1]
    far_in, far_out = Draft.of(table, problem).rows_across_nodes
    sent_PP = split_rows(counts_PE, ReplicaTable.of(table, counts_PE.sum(0)), nodes).sent_PP
    far_PP = np.where(np.not_equal.outer(nodes, nodes), sent_PP, 0)
    if slots == 4:  # each expert has one place: nothing is left to chance
        np.testing.assert_allclose([far_in, far_out], [far_PP.sum(0), far_PP.sum(1)])
        return
    for found, rows in ((far_in, far_PP.sum(0)), (far_out, far_PP.sum(1))):
        np.testing.assert_allclose(found, rows, rtol=0.3)
        np.testing.assert_allclose(np.bincount(nodes, found), np.bincount(nodes, rows), rtol=0.05)


@pytest.mark.parametrize("card_per_rank", [False, True])
def test_over_nodes_a_plan_is_faster_than_a_table_that_knows_none(card_per_rank: bool) -> None:
    nodes, counts_PE = nodes_of(16, 4), gate(16)
    problem = PlanProblem(
        counts_PE=counts_PE,
        slots_P=(6,) * 16,
        current=Placement.contiguous(64, 16),
        costs=replace(
            COSTS,
            card_per_rank=card_per_rank,
            row_seconds=8 * COSTS.row_seconds,
            row_bytes=64 * COSTS.row_bytes,
        ),
        node_P=nodes,
    )
    found = {
        planner: problem.judge(answer(PlanConfig(planner=planner), problem))
        for planner in ("greedy", "incremental")
    }
    assert found["incremental"].total < (0.9 if not card_per_rank else 1.0) * found["greedy"].total
    if not card_per_rank:  # else the card with most rows counts, not all of them
        assert found["incremental"].cross_share < 0.9 * found["greedy"].cross_share
