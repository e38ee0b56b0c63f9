"""Interleaved stages, by hand; `test_torch_csv` compares them with torch."""

from __future__ import annotations

import pytest
from orders import orders

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.check import verify
from moeclipse.schedule.interleaved import interleaved, interleaved_pairs, local_order, round_size


def test_rounds() -> None:
    assert [round_size(4, M) for M in (1, 4, 8, 10)] == [1, 4, 4, 5]
    assert local_order(4, 2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


def test_two_ranks_by_hand() -> None:
    first = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert orders(interleaved(2, 2)) == [first, "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]
    assert orders(interleaved_pairs(2, 2)) == [first, "1F0 1F1 3F0 (3F1;3B0) 3B1 1B0 1B1"]


def test_memory_is_that_of_the_warm_up() -> None:
    assert verify(interleaved(4, 8, 2)).peak == (11, 9, 7, 5)
    assert verify(interleaved_pairs(4, 8, 2)).peak == (12, 10, 8, 6), "one more each"
    assert verify(interleaved(4, 8, 1)).peak == (7, 5, 3, 1)


def test_every_forward_behind_the_warm_up_is_paired() -> None:
    program = interleaved_pairs(4, 8, 2)
    pairs = [sum(op.kind is kinds.PAIR for op in ops) for ops in program.ranks]
    assert pairs == [8 * 2 - (2 * (3 - r) + 4 + 1) for r in range(4)] == [5, 7, 9, 11]
    assert not any(op.kind is kinds.PAIR for ops in interleaved(4, 8, 2).ranks for op in ops)


def test_rounds_must_be_equal() -> None:
    with pytest.raises(ScheduleError, match="rounds of equal size"):
        interleaved(4, 11)
