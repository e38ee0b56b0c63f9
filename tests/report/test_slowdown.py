"""What compute pays for communication beside it."""

from __future__ import annotations

import pytest

from moeclipse.report.slowdown import Slowdown


def test_the_same_op_beside_and_alone() -> None:
    slowdown = Slowdown()
    ops = [("attn", 0.0, 1.0), ("attn", 2.0, 3.2), ("mlp", 5.0, 7.0), ("mlp", 8.0, 10.8)]
    slowdown.add(ops, [(1.9, 3.3), (7.9, 9.0), (8.5, 11.0)])
    assert slowdown.ratio() == pytest.approx((1.2 + 2.8) / (1.0 + 2.0))


def test_steps_add_up_and_many_weigh_more() -> None:
    slowdown = Slowdown()
    for start in (0.0, 10.0):
        slowdown.add([("a", start, start + 1.0)], [])
    for start in (20.0, 30.0, 40.0):
        slowdown.add([("a", start, start + 1.5)], [(start, start + 2.0)])
    assert slowdown.ratio() == pytest.approx(1.5)


def test_nothing_is_said_of_ops_that_ran_one_way() -> None:
    slowdown = Slowdown()
    assert slowdown.ratio() is None
    slowdown.add([("a", 0.0, 1.0), ("b", 2.0, 3.0), ("c", 4.0, 4.0)], [(2.0, 3.0)])
    assert slowdown.ratio() is None
    slowdown.add([("a", 5.0, 6.0)], [(5.0, 5.5)])
    assert slowdown.ratio() is None, "half beside says little"
