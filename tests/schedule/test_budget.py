"""Orders for a budget of activations: they keep it, the clock is the simulator's, more room is no slower."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule.budget import ActionSeconds, makespan, zb_m
from moeclipse.schedule.check import verify
from moeclipse.schedule.zero_bubble import zb_h1, zb_h2
from moeclipse.sim.engine import simulate


@settings(max_examples=40)
@given(
    P=st.integers(1, 5),
    M=st.integers(1, 9),
    budget=st.integers(1, 10),
    seconds=st.tuples(*[st.sampled_from([0.5, 1.0, 1.5])] * 3),
)
def test_any_budget_is_kept_and_the_clock_is_the_simulators(
    P: int, M: int, budget: int, seconds: tuple[float, float, float]
) -> None:
    priced = ActionSeconds(*seconds)
    program = zb_m(P, M, budget, priced)
    verified = verify(program, budget)
    costs = Costs(seconds=priced._asdict())
    assert makespan([list(ops) for ops in program.ranks], priced) == pytest.approx(
        simulate(verified, costs).makespan
    )


@pytest.mark.parametrize(("P", "M"), [(4, 8), (4, 12), (8, 20)])
def test_more_room_is_never_slower_and_known_orders_are_reached(P: int, M: int) -> None:
    slow = ActionSeconds(1.0, 1.4, 0.7)
    costs = Costs(seconds=slow._asdict())
    found = [simulate(zb_m(P, M, budget, slow), costs).makespan for budget in range(1, 2 * P)]
    assert found[0] > 2 * found[P - 1]
    assert found[P - 1] <= simulate(zb_h1(P, M), costs).makespan
    assert found[2 * P - 2] <= simulate(zb_h2(P, M), costs).makespan < found[P - 1]
    assert all(after <= 1.001 * before for before, after in pairwise(found[:P]))


def test_one_microbatch_at_a_time() -> None:
    assert simulate(zb_m(3, 4, 1), Costs(seconds={"F": 1.0, "I": 1.0, "W": 1.0})).makespan == 4 * 7
    assert verify(zb_m(4, 8)).peak == (4, 4, 4, 4), "as many as ranks unless given"


def test_no_budget_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a budget of at least one microbatch, but got -1"):
        zb_m(2, 4, -1)
