"""Wrap-fill over nodes: everything fits, ranks are even, and rows stay on their node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from plans import COSTS, check_fits, problems

from moeclipse.balance.nodes import plan_two_level
from moeclipse.balance.objective import nodes_of, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.split import ReplicaTable, split_rows


@settings(deadline=None)
@given(problems())
def test_two_levels_fit(problem: tuple[np.ndarray, tuple[int, ...]]) -> None:
    counts_PE, slots_P = problem
    nodes = [rank % 2 for rank in range(len(slots_P))]
    check_fits(plan_two_level(counts_PE, slots_P, nodes), counts_PE.shape[1], slots_P)


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
