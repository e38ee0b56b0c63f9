"""Models folded over the ranks: orders keep their budget, and their clock is the simulator's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import orders

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule.budget import zb_m
from moeclipse.schedule.check import verify
from moeclipse.schedule.folded import DRAWINGS, Drawing, drawn, timed
from moeclipse.schedule.op import pipeline_program
from moeclipse.schedule.shape import StagePlacement
from moeclipse.sim.engine import simulate

TICK = Costs(seconds={"F": 1.0, "I": 1.0, "W": 1.0})


def test_a_drawing_by_hand() -> None:
    """Down two ranks, up, and down again: forward passes six stages, backward comes back through them."""
    there, back = drawn(Drawing(2, 3, 1, 4), StagePlacement.folded(2, 3))
    assert there == [0, 2, 3, 6, 7, 9]
    assert back == [18, 17, 16, 12, 11, 10]


def test_the_smallest_fold_by_hand() -> None:
    assert orders(zb_m(2, 1, stages_per_rank=2)) == [
        "0F0 3F0 3I0 3W0 0I0 0W0",
        "1F0 2F0 2I0 1I0 2W0 1W0",
    ]


@settings(max_examples=40)
@given(
    P=st.integers(1, 5),
    V=st.integers(2, 4),
    M=st.integers(1, 9),
    budget=st.integers(1, 7),
)
def test_any_budget_is_kept_with_any_number_of_stages(P: int, V: int, M: int, budget: int) -> None:
    assert max(verify(zb_m(P, M, budget, stages_per_rank=V), budget * V).peak) <= budget * V


@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize(("P", "V", "M", "limit"), [(3, 2, 7, 6), (4, 3, 9, 12), (2, 4, 5, 5)])
def test_the_clock_is_the_simulators(drawing: Drawing, P: int, V: int, M: int, limit: int) -> None:
    placement = StagePlacement.folded(P, V)
    there, back = drawn(drawing, placement)
    order = timed((there, back), back[0] + 1, placement, M, limit)
    assert order is not None, "one microbatch at a time has room"
    for period in (3 * V, back[0] + 1):
        order = timed((there, back), period, placement, M, limit)
        if order is not None:
            verified = verify(pipeline_program("zb-m", order.ranks, placement, M), limit)
            assert simulate(verified, TICK).makespan == order.makespan
            assert max(verified.peak) == order.held


def test_with_little_room_a_fold_is_a_fifth_faster_than_one_stage_a_rank() -> None:
    """Eight ranks, 24 microbatches; as the page of schedules says."""

    def share(budget: int, V: int) -> float:
        """Of what a rank computes."""
        costs = Costs(seconds=dict.fromkeys("FIW", 1.0 / V))
        return simulate(zb_m(8, 24, budget, stages_per_rank=V), costs).makespan / (3 * 24)

    assert [round(share(5, V), 2) for V in (1, 2, 3)] == [1.4, 1.15, 1.11]
    assert [round(share(8, V), 2) for V in (1, 2, 3)] == [1.1, 1.05, 1.08]


def test_no_budget_is_refused_for_folds_too() -> None:
    with pytest.raises(ScheduleError, match="a budget of at least one microbatch, but got -1"):
        zb_m(2, 4, -1, stages_per_rank=2)
