"""What travels is what owners and holders say, rank by rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moeclipse.balance.migration import RankMoves, expert_moves, moved
from moeclipse.balance.ownership import Ownership


@given(st.data())
def test_state_moves_as_owners_say(data: st.DataObject) -> None:
    """Each rank sends and receives the elements whose owner is another, whatever the two placements."""
    old = data.draw(placements())
    new = data.draw(placements(old.num_experts, old.num_ranks))
    size = 840 * 8  # any number of replicas up to 8 divides it
    before, after = (Ownership.of(table, grain=1) for table in (old, new))
    gets, gives = [0] * old.num_ranks, [0] * old.num_ranks
    arrived = [0] * old.num_ranks
    for transfer in before.transfers(after, (size,)):
        if transfer.owners is None:
            arrived[transfer.target] += 1
            continue
        first, last = transfer.owners[0].overlap(transfer.owners[1], size)
        gets[transfer.target] += last - first
        gives[transfer.source] += last - first
    moves = moved(old, new)
    assert [size * move.states_in for move in moves] == pytest.approx(gets)
    assert [size * move.states_out for move in moves] == pytest.approx(gives)
    assert [move.weights_in for move in moves] == arrived
    assert sum(move.weights_out for move in moves) == pytest.approx(sum(arrived))
    assert moved(old, old) == tuple(map(RankMoves, range(old.num_ranks)))


def test_one_owner_hands_all_of_it_over() -> None:
    """The yardstick: state is the primary's, and moves when that does, be the ranks the same."""
    assert expert_moves((0, 1), (0, 1), (0, 0)) == ()
    first, second = expert_moves((0, 1), (0, 1), (0, 1))
    assert (first.states_out, first.states_in, first.weights_in) == (1.0, 0.0, 0.0)
    assert (second.states_out, second.states_in, second.weights_in) == (0.0, 1.0, 0.0)
