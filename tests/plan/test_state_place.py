"""State on the host: the smallest share that fits, the ring, and what of its way is not hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.plan.published import QWEN3_30B, V3
from moeclipse.plan.state_place import StatePlace, ring_parameters


def test_the_share_is_the_smallest_with_which_every_rank_fits() -> None:
    place = StatePlace(host_room=1000.0, each=4.0)
    assert place.share((90.0, 100.0), (100.0, 100.0), 10.0, 100.0) == 0
    assert place.share((90.0, 130.0), (100.0, 100.0), 10.0, 100.0) == 0.1
    assert place.share((90.0, 130.1), (100.0, 100.0), 10.0, 100.0) == 0.11
    assert place.share((150.0, 130.0), (25.0, 100.0), 10.0, 100.0) == 0.6
    assert place.share((501.0,), (100.0,), 0.0, 100.0) is None, "more than all of it"
    assert replace(place, host_room=39.0).share((130.0,), (100.0,), 10.0, 100.0) is None
    assert StatePlace().share((130.0,), (100.0,), 10.0, 100.0) is None, "the host has no room"
    assert replace(place, host_room=100.0).share((130.0,), (100.0,), 10.0, 100.0, taken=61.0) is None, (
        "others"
    )
    assert replace(place, state=False).share((130.0,), (100.0,), 10.0, 100.0) is None
    assert replace(place, state=False).share((90.0,), (100.0,), 10.0, 100.0) == 0
    assert replace(place, fixed=0.5).share((90.0,), (100.0,), 10.0, 100.0) == 0.5


def test_the_ring_holds_the_largest_neighbours() -> None:
    stack, between = 128 * 2048 * 768, QWEN3_30B.dense_parameters(0)
    large = 2 * stack + stack + between  # a stack twice as large, and what lies on one side of it
    assert large <= ring_parameters(QWEN3_30B, 1) <= large + stack + between
    assert ring_parameters(QWEN3_30B, 3) > 2 * ring_parameters(QWEN3_30B, 1)
    frozen = replace(QWEN3_30B, trained_tables=(False, False))
    assert ring_parameters(frozen, 3) <= ring_parameters(QWEN3_30B, 3)
    assert StatePlace(each=2.0).ring(V3, 64) == pytest.approx(2 / 64 * ring_parameters(V3, 3))


def test_what_is_left_is_the_way_behind_the_ring_and_beside_nothing() -> None:
    assert StatePlace.left(5.0, 1.0, 2.5) == 1.5
    assert StatePlace.left(5.0, 1.0, 7.0) == 0.0
