"""Interval arithmetic against a brute-force count of points, and the identity that must always hold."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from moeclipse.report.intervals import TransferInterval, clip, length, split_step, subtract, union

END = 40
spans = st.lists(
    st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda p: (float(min(p)), float(max(p)))),
    max_size=8,
)
transfers = st.lists(
    st.tuples(st.integers(-5, END), st.integers(0, 9), st.integers(0, 9)).map(
        lambda p: TransferInterval(
            label="t", launched=float(p[0]), last_launched=float(p[0] + p[1]), done=float(p[0] + p[1] + p[2])
        )
    ),
    max_size=8,
)


def points(some: list[tuple[float, float]]) -> set[int]:
    """The unit cells that a list of integer spans covers."""
    return {cell for a, b in some for cell in range(int(a), int(b))}


@given(spans, spans)
def test_union_and_subtract_by_counting_points(some: list, others: list) -> None:
    assert points(union(some)) == points(some)
    assert length(union(some)) == len(points(some))
    assert points(subtract(some, others)) == points(some) - points(others)
    assert length(subtract(some, others)) == len(points(some) - points(others))


@given(spans, spans, transfers)
def test_a_step_splits_without_rest(compute: list, waits: list, moves: list) -> None:
    window = (3.0, 33.0)
    split = split_step(window, compute=compute, waits=waits, transfers=moves)
    assert math.isclose(split.compute + split.exposed + split.straggle + split.idle, split.step)
    assert split.idle >= 0
    inside = set(range(3, 33))
    computing = (points(compute) - points(waits)) & inside
    moving = points([(m.last_launched, m.done) for m in moves]) & inside
    late = points([(m.launched, m.last_launched) for m in moves]) & inside
    assert split.compute == len(computing)
    assert split.exposed == len(moving - computing)
    assert split.straggle == len(late - computing - moving)
    assert split.comm == len(moving)
    assert split.hidden == len(moving & computing)


def test_waiting_for_a_late_peer_is_not_communication() -> None:
    late = TransferInterval(label="dispatch", launched=1.0, last_launched=4.0, done=5.0)
    split = split_step((0.0, 6.0), compute=[(0.0, 6.0)], waits=[(1.0, 5.0)], transfers=[late])
    assert (split.compute, split.straggle, split.exposed, split.idle) == (2.0, 3.0, 1.0, 0.0)


def test_a_transfer_under_compute_is_hidden() -> None:
    move = TransferInterval(label="reduce", launched=1.0, last_launched=1.0, done=5.0)
    split = split_step((0.0, 6.0), compute=[(0.0, 6.0)], waits=[(4.0, 5.0)], transfers=[move])
    assert (split.hidden, split.exposed) == (3.0, 1.0)


def test_a_step_without_communication_hides_nothing() -> None:
    split = split_step((0.0, 2.0), compute=[(0.0, 1.0)], waits=[], transfers=[])
    assert (split.hidden, split.idle) == (0.0, 1.0)
    assert clip([(0.0, 9.0)], (2.0, 3.0)) == [(2.0, 3.0)]
