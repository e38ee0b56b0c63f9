"""DualPipe and DualPipeV, by hand; `test_torch_csv` compares dualpipev with torch."""

from __future__ import annotations

import pytest
from orders import orders

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.check import verify
from moeclipse.schedule.dualpipe import dualpipe, dualpipev


def test_the_fold_alone_by_hand() -> None:
    """The first pair of the fold would need what it makes, so it runs as F, B."""
    assert orders(dualpipev(1, 2)) == ["0F0 1F0 0F1 1B0 (1F1;0B0) 1B1 0I1 0W1"]


def test_two_directions_by_hand() -> None:
    """Stages 2 and 3 are the second copy, which takes the second half of the microbatches."""
    assert orders(dualpipe(2, 4)) == [
        "0F0 3F2 0F1 3B2 (3F3;0B0) 3B3 0I1 0W1",
        "2F2 1F0 2F3 1B0 (1F1;2B2) 1B1 2I3 2W3",
    ]
    assert dualpipe(2, 4).pipeline().placement.num_chains == 2


def test_memory() -> None:
    assert verify(dualpipe(4, 12)).peak == (5, 5, 5, 5)
    assert verify(dualpipev(4, 12)).peak == (9, 9, 9, 9)


def test_pairs_are_as_many_as_the_table_says() -> None:
    """2(M-2P+r+1) + (P-r-1), less the unfused first one at the fold."""
    P, M = 4, 10
    pairs = [sum(op.kind is kinds.PAIR for op in ops) for ops in dualpipev(P, M).ranks]
    expected = [2 * (M - 2 * P + r + 1) + (P - r - 1) - (r == P - 1) for r in range(P)]
    assert pairs == expected == [9, 10, 11, 11]


def test_weight_gradients_take_the_oldest_open_one() -> None:
    for ops in dualpipev(4, 8).ranks:
        halves = [(op.stage, op.microbatch) for op in ops if op.kind is kinds.I]
        assert halves == [(op.stage, op.microbatch) for op in ops if op.kind is kinds.W]


def test_settings_that_it_cannot_fold_are_refused() -> None:
    with pytest.raises(ScheduleError, match="at least two microbatches per rank"):
        dualpipev(4, 7)
    with pytest.raises(ScheduleError, match="an even number of microbatches"):
        dualpipe(4, 9)
