"""Zero-bubble orders, by hand; `test_torch_csv` compares zb-v with torch."""

from __future__ import annotations

import pytest
from orders import orders

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import UNIT, Costs
from moeclipse.schedule.check import verify
from moeclipse.schedule.zero_bubble import zb_h1, zb_h2, zb_v
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise


def test_zb_h1_by_hand() -> None:
    assert orders(zb_h1(2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert verify(zb_h1(4, 8)).peak == (4, 4, 4, 4)


@pytest.mark.parametrize(("P", "M"), [(2, 3), (4, 7), (4, 12), (8, 20)])
def test_no_rank_of_zb_h2_waits_between_its_first_and_its_last_action(P: int, M: int) -> None:
    verified = verify(zb_h2(P, M))
    assert verified.peak == (2 * P - 1,) * P
    found = summarise(simulate(verified, UNIT))
    assert [rank.local_bubble for rank in found.ranks] == [0.0] * P
    assert max(rank.local_bubble for rank in summarise(simulate(zb_h1(P, M), UNIT)).ranks) == P - 1


def test_long_input_gradients_cost_zb_h1_alone() -> None:
    slow = Costs(seconds={"F": 1.0, "I": 1.4, "W": 0.7})
    ideal = 12 * 3.1 + 3 * 1.0  # the work of a rank, and forwards on the way to the last
    assert simulate(zb_h2(4, 12), slow).makespan == pytest.approx(ideal)
    assert simulate(zb_h1(4, 12), slow).makespan == pytest.approx(ideal + 3 * 0.7)


def test_zb_v_by_hand() -> None:
    assert orders(zb_v(2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert verify(zb_v(4, 12)).peak == (8, 8, 8, 8)


def test_fewer_microbatches_than_drawn_leave_the_rest_out() -> None:
    for M in range(1, 7):
        program = zb_v(4, M)
        verify(program)
        assert program.num_ops == 8 * M * 3


def test_two_stages_per_rank_or_none() -> None:
    with pytest.raises(ScheduleError, match="zb-v needs two stages per rank"):
        zb_v(2, 4, 3)
