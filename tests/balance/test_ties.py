"""Last bits of loads and costs decide nothing: plans and shadows of tied experts are the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import COSTS
from plans import shadow_costs as costs

from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.problem import half_of_bits
from moeclipse.balance.shadow import choose_shadows


@given(st.lists(st.floats(allow_nan=False, width=64), min_size=1))
def test_no_order_is_turned(values: list[float]) -> None:
    with np.errstate(over="ignore"):
        rounded = half_of_bits(np.sort(values))
    assert (rounded[1:] >= rounded[:-1]).all()


def test_whole_numbers_stay_and_last_bits_go() -> None:
    whole = np.array([0.0, 1.0, 12345.0, 2.0**26 - 1, -7.0])
    assert half_of_bits(whole).tolist() == whole.tolist()
    assert half_of_bits(np.array([[0.3 * (1 + 4e-16)]])).tolist() == half_of_bits(np.array([[0.3]])).tolist()


def tied(seed: int) -> np.ndarray:
    """Four groups of experts that are equally busy, from every rank."""
    counts_E = np.repeat([900.0, 300.0, 100.0, 40.0], 4) / 7
    return np.tile(np.random.default_rng(seed).permutation(counts_E), (4, 1))


@pytest.mark.parametrize("planner", ["greedy", "incremental", "wrap_fill"])
@pytest.mark.parametrize("seed", range(4))
def test_planners(planner: str, seed: int) -> None:
    counts_PE, current = tied(seed), Placement.contiguous(16, 4)
    noise = np.random.default_rng(seed + 9).choice([-1, 0, 1], counts_PE.shape) * 2e-16
    one, other = (
        plan(PlanConfig(planner=planner), given, (5,) * 4, current, COSTS)
        for given in (counts_PE, counts_PE * (1 + noise))
    )
    assert one == other
    assert planner != "greedy" or one != current  # the others stay where a clean table would be slower


def test_greedy_takes_the_lower_number_first() -> None:
    counts_PE = np.full((2, 4), 10.0)
    placed = plan(PlanConfig(planner="greedy"), counts_PE, (3, 3), Placement.contiguous(4, 2), COSTS)
    copies = [len(ranks) for ranks in placed.holders]
    assert copies == sorted(copies, reverse=True)


@pytest.mark.parametrize("bandwidth", [125e6, 2e8, 1e9])
def test_shadows(bandwidth: float) -> None:
    """Rows are whole numbers here, so equal experts have equal prices, to the bit: the first is lent."""
    counts_PE = np.zeros((4, 8), dtype=np.int64)
    counts_PE[:, 2:4] = 5000
    found = choose_shadows(counts_PE, Placement.contiguous(8, 4), costs(bandwidth=bandwidth), max_shadows=1)
    assert found.shadows[0][0] == 2
