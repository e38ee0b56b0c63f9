"""Looking for plans: all layers once, then those that pay, and the others in turn."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from plans import FREE

from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import NODES, PlanConfig
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.background_plan import PlanRequest
from moeclipse.train.placement.search_budget import (
    PAYS,
    SEARCHED_S,
    SHARE,
    SLOT_S,
    SearchBudget,
    StepClock,
    counted_times,
    search_seconds,
)


def budget(search_s: float, step_s: float = 0.1) -> SearchBudget:
    return SearchBudget(search_s=search_s, step_s=step_s, every=10, first=10)


def test_the_first_round_searches_all() -> None:
    assert budget(100.0).worth(9, [0.0, 0.0, 0.0]) == [0, 1, 2]
    assert budget(100.0).worth(19, [0.0, 0.0, 0.0]) == []


def test_a_search_that_surely_pays_is_never_put_off() -> None:
    pays = PAYS * 0.05 / 10
    assert budget(0.05).worth(19, [pays, 0.9 * pays, 2 * pays]) == [0, 2]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("search_s", [0.001, 0.013, 0.08])
def test_all_others_take_their_share_of_all_steps(search_s: float, layers: int) -> None:
    steps, searched = 4000, 0
    found = budget(search_s)
    for step in range(10, steps):
        if (step + 1) % 10 == 0:
            searched += len(found.worth(step, [1e-9 * layer for layer in range(layers)]))
    allowed = SHARE * 0.1 * (steps - 10) / search_s
    # More than all layers are not searched in a round.
    assert searched == pytest.approx(min(allowed, layers * (steps - 10) / 10), abs=1)


def test_those_come_first_that_could_win_most() -> None:
    one = budget(0.005)  # one layer a round
    assert one.worth(19, [0.0, 3e-6, 3e-6, 1e-6]) == [1]
    assert budget(0.0025).worth(19, [0.0, 3e-6, 1e-6, 2e-6]) == [1, 3]


def asked(counts_PE: Any) -> PlanRequest:
    current = Placement.parse([[0, 1], [2, 3]])
    return PlanRequest(
        config=PlanConfig(planner="auto"),
        counts_PE=np.array(counts_PE),
        current=current,
        costs=FREE,
        node_P=(0, 0),
    )


def test_what_can_be_won_is_what_the_fullest_rank_is_above_any_table() -> None:
    """The mean is 10, but an expert of 12 rows stands on one rank: no slot is left for a replica."""
    uneven, even = asked([[6, 2, 1, 1], [6, 2, 1, 1]]), asked([[2, 2, 2, 2], [2, 2, 2, 2]])
    assert uneven.avoidable_s == pytest.approx((16 - 12) * FREE.row_seconds)
    assert even.avoidable_s == 0.0
    assert budget(1e-9).picked(19, [even, uneven]) == [0, 1]
    found = SearchBudget(search_s=100 * uneven.avoidable_s / PAYS, step_s=0.0, every=100, first=10)
    assert found.picked(19, [even, uneven]) == [1]


def test_a_search_is_timed_with_something_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loads of the moment are even: then a look at them would tell nothing."""
    seen = []

    def busy(request: PlanRequest) -> None:
        seen.append(request)
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(PlanRequest, "plan", busy)
    assert search_seconds(asked([[2, 2, 2, 2], [2, 2, 2, 2]])) >= 0.01
    assert seen[0].avoidable_s > 0
    assert seen[0].config.noise > 0
    assert search_seconds(asked([[0, 0, 0, 1], [0, 0, 0, 0]])) >= 0.01


def test_a_clock_of_steps_tells_the_median() -> None:
    clock = StepClock()
    assert clock.median_s == 0.0
    for took in (50.0, 1.0, 9.0):
        clock.add(took)
    assert clock.median_s == 9.0
    for _ in range(20):
        clock.add(1.0)
    assert clock.median_s == 1.0, "of the last steps alone"


def test_times_by_the_book_follow_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, small = Mesh.single(), TrainConfig()
    large = with_values(small, {"data.batch_size": 2 * small.data.batch_size, "moe.num_experts": 256})
    one, other = counted_times(small, mesh), counted_times(large, mesh)
    assert one == counted_times(small, mesh)
    assert other["step_s"] > 2 * one["step_s"] > 0
    assert (one["search_s"], other["search_s"]) == (SLOT_S * small.moe.num_experts, SEARCHED_S)
    monkeypatch.setattr(mesh, "hosts", (0, 1))
    assert counted_times(large, mesh)["search_s"] == NODES * SEARCHED_S
