"""Interleaved stages, by hand; `test_torch_csv` compares them with torch."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from orders import orders

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.check import verify
from moeclipse.schedule.interleaved import group_sizes, interleaved, interleaved_pairs, local_order


def test_groups() -> None:
    assert [group_sizes(4, M) for M in (1, 4, 8, 10, 11)] == [[1], [4], [4, 4], [5, 5], [6, 5]]
    assert group_sizes(2, 5, 3) == [3, 2], "as Megatron has them"
    assert group_sizes(4, 13, 4) == [4, 4, 5], "a rest that is shorter than the pipeline joins the last group"
    assert group_sizes(4, 3, 8) == [3]
    assert group_sizes(2, 8, 4) == [4, 4]
    assert local_order(2, [2, 1]) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


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


def test_a_ragged_last_group_by_hand() -> None:
    """PP 2, N 3, M 5, VP 2."""
    first, last = orders(interleaved(2, 5, 2, 3))
    assert first.startswith("0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1")
    assert last.startswith("1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4")


@given(
    P=st.integers(1, 6), V=st.integers(1, 4), M=st.integers(1, 20), more=st.integers(0, 6), auto=st.booleans()
)
@example(P=2, V=2, M=5, more=0, auto=False).via("a last group that is larger than the first")
def test_any_number_of_microbatches_runs(P: int, V: int, M: int, more: int, auto: bool) -> None:
    for make in (interleaved, interleaved_pairs):
        verified = verify(make(P, M, V, 0 if auto else P + more))
        extra = make is interleaved_pairs
        G = max(group_sizes(P, M, 0 if auto else P + more))
        assert max(verified.peak) <= min(2 * (P - 1) + (V - 1) * G + 1 + extra, M * V)


def test_small_groups_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"at least as many microbatches as ranks \(4\), but has 3"):
        interleaved(4, 8, 2, 3)
