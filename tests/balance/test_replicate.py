"""Planners that start from a clean table: no expert is lost, slots are kept to, and names cost nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import check_fits, problems
from strategies import zipf_counts

from moeclipse.balance.placement import Placement
from moeclipse.balance.replicate import plan_greedy, plan_random, plan_wrap_fill, relabelled, slots_for
from moeclipse.core.errors import ConfigError


@settings(deadline=None)
@given(problems(), st.integers(0, 99))
def test_clean_tables_fit(problem: tuple[np.ndarray, tuple[int, ...]], seed: int) -> None:
    counts_PE, slots_P = problem
    load_E = counts_PE.sum(0)
    for placement in (
        plan_random(len(load_E), slots_P, seed),
        plan_greedy(load_E, slots_P),
        plan_wrap_fill(load_E, slots_P),
    ):
        check_fits(placement, len(load_E), slots_P)


def test_relabelling_moves_less() -> None:
    counts_PE = zipf_counts(16, 64, 1.2)
    old = plan_wrap_fill(counts_PE.sum(0), (6,) * 16)
    shuffled = Placement(tuple(old.slots[(p * 5) % 16] for p in range(16)))
    assert len(old.moves(shuffled)) > 50
    again = relabelled(shuffled, old)
    assert not [move for move in old.moves(again) if move.weights]


def test_wrap_fill_lets_load_flow_from_rank_to_rank() -> None:
    """E + P - 1 slots: neighbours share an expert, so every rank can be filled to the mean."""
    load_E = np.array([50.0, 30.0, 10.0, 6.0, 4.0])
    placement = plan_wrap_fill(load_E, (3, 3, 3), spare=False)
    assert placement.num_replicas <= 5 + 3 - 1
    assert len(placement.holders[0]) == 2, "the largest expert is more than a rank's share"
    filled = plan_wrap_fill(load_E, (3, 3, 3))
    assert filled.num_replicas == 9, "slots that remain hold further replicas"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((9, 2, 4), r"9 experts do not fit into 8 slots \(2 ranks\); .* at least 5 slots"),
        ((4, 2, [4]), "slots are given for 1 ranks, but there are 2"),
        ((1, 2, [2, -1]), r"slots \(-1\) must not be negative"),
    ],
)
def test_slots_that_cannot_be_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slots_for(*arguments)
