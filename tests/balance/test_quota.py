"""A rank fills the replicas of each expert in one order: its own first, then by slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.split import QuotaOrder


def test_the_own_replica_comes_first() -> None:
    placement = Placement(((0, 1), (1, EMPTY, 2), (2, 0)))  # slots 0 1 | 2 3 4 | 5 6
    order = QuotaOrder.of(placement, 2)
    assert order.slots_R.tolist() == [6, 0, 1, 2, 5, 4]
    assert order.first_E.tolist() == [0, 2, 4, 6]


@given(st.data())
def test_every_replica_has_one_turn(data: st.DataObject) -> None:
    placement = data.draw(placements())
    me = data.draw(st.integers(0, placement.num_ranks - 1))
    flat = [(rank, expert) for rank, row in enumerate(placement.slots) for expert in row]
    order = QuotaOrder.of(placement, me)
    for expert in range(placement.num_experts):
        turns = order.slots_R[order.first_E[expert] : order.first_E[expert + 1]].tolist()
        own = [slot for slot, held in enumerate(flat) if held == (me, expert)]
        others = [slot for slot, (rank, held) in enumerate(flat) if held == expert and rank != me]
        assert turns == own + others
    assert order.first_E[-1] == len(order.slots_R) == placement.num_replicas
