"""GPipe and 1F1B, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from orders import orders

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.check import verify
from moeclipse.schedule.one_f_one_b import (
    gpipe,
    microbatch_pairs,
    one_f_one_b,
    one_f_one_b_pairs,
    paired_rank,
)
from moeclipse.schedule.op import Program


def test_gpipe() -> None:
    assert orders(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert verify(gpipe(4, 8)).peak == (8, 8, 8, 8)


def test_one_f_one_b() -> None:
    assert orders(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert verify(one_f_one_b(4, 8)).peak == (4, 3, 2, 1)
    assert orders(one_f_one_b(3, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"], "fewer microbatches than warm-up"


def test_pairs_need_two_warm_up_forwards_per_hop() -> None:
    assert orders(one_f_one_b_pairs(2, 4)) == [
        "0F0 0F1 0F2 (0F3;0B0) 0B1 0B2 0B3",
        "1F0 (1F1;1B0) (1F2;1B1) (1F3;1B2) 1B3",
    ]
    assert verify(one_f_one_b_pairs(4, 12)).peak == (8, 6, 4, 2)


def test_one_rank_pairs_neighbouring_microbatches() -> None:
    assert orders(microbatch_pairs(1, 3)) == ["0F0 (0F1;0B0) (0F2;0B1) 0B2"]
    assert verify(microbatch_pairs(1, 8)).peak == (2,)
    assert [str(op) for op in paired_rank(5, 2, 3)] == ["5F0", "5F1", "(5F2;5B0)", "5B1", "5B2"]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, one_f_one_b_pairs, microbatch_pairs])
def test_nothing_to_do_is_refused(make: Callable[[int, int], Program]) -> None:
    with pytest.raises(ScheduleError, match="at least one rank, one microbatch"):
        make(1, 0)
