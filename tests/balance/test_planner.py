"""Whichever planner is asked: every expert is placed, slots are kept to, bad questions are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import COSTS, check_fits, problems

from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.replicate import plan_greedy, plan_random
from moeclipse.core.errors import ConfigError


@settings(deadline=None, max_examples=50)
@given(problems(), st.sampled_from(["random", "greedy", "incremental", "wrap_fill"]), st.integers(0, 9))
def test_every_planner_goes_on_from_any_placement(
    problem: tuple[np.ndarray, tuple[int, ...]], planner: str, seed: int
) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    config = PlanConfig(planner=planner, seed=seed + 1)
    new = plan(
        config, counts_PE.astype(float), slots_P, current, COSTS, [r // 2 for r in range(len(slots_P))]
    )
    check_fits(new, counts_PE.shape[1], slots_P)
    assert new == plan(
        config, counts_PE.astype(float), slots_P, current, COSTS, [r // 2 for r in range(len(slots_P))]
    )
    wanted = {(e, p) for e, ranks in enumerate(new.holders) for p in ranks}
    held = {(e, p) for e, ranks in enumerate(current.holders) for p in ranks}
    moved = [move for move in current.moves(new) if move.weights]
    assert len(moved) == len(wanted - held)


def test_nothing_moves_when_the_split_is_enough() -> None:
    """Loads that drift a little: replicas take it up, and the plan is the placement itself."""
    rng = np.random.default_rng(1)
    weight = np.arange(1, 65) ** -1.2
    counts_PE = rng.multinomial(32768, weight / weight.sum(), size=8)
    current = plan_greedy(counts_PE.sum(0), (10,) * 8)
    weight = weight * np.exp(rng.normal(0, 0.1, 64))
    drifted = rng.multinomial(32768, weight / weight.sum(), size=8).astype(float)
    assert plan(PlanConfig(), drifted, (10,) * 8, current, COSTS) is current


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlanConfig(planner="best"), "planner 'best' is unknown; choose one of random, greedy"),
        (lambda: PlanConfig(max_moved=2, noise=-1), "2 problems"),
        (
            lambda: plan(PlanConfig(), np.ones((2, 4)), (1, 3), Placement.contiguous(4, 2), COSTS),
            "rank 0 has 2 slots now, but only 1 in the plan; give it 2",
        ),
        (
            lambda: plan(PlanConfig(), np.ones((2, 5)), (2, 2), Placement.contiguous(4, 2), COSTS),
            r"counts are \[2, 5\] .* the current placement has 2 ranks and 4 experts",
        ),
    ],
)
def test_bad_questions_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.full
@settings(deadline=None, max_examples=500)
@given(problems(), st.integers(0, 1000))
def test_many_random_replacements(problem: tuple[np.ndarray, tuple[int, ...]], seed: int) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    for planner in ("incremental", "wrap_fill", "greedy", "random"):
        config = PlanConfig(planner=planner, seed=seed)
        current = plan(config, counts_PE.astype(float), slots_P, current, COSTS)
        check_fits(current, counts_PE.shape[1], slots_P)
