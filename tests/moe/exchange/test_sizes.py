"""The table of sizes, read by one rank: units, segments, and who sends how much."""

from __future__ import annotations

from moeclipse.moe.exchange.dispatch import Sizes, meetings
from moeclipse.schedule.smart import exchange_shape

SLOTS = [0, 2, 3]
TABLE = [[4, 1, 2, 4, 2], [0, 3, 1, 3, 1]]
"""Of two ranks: pairs for each slot, rows for each rank."""


def test_a_blocking_exchange_is_one_unit() -> None:
    sizes = Sizes(TABLE, SLOTS, 0, exchange_shape(2, group_size=2, blocking=True))
    (unit,) = sizes.units().values()
    assert unit.counts == [4, 4], "what both ranks have for the two slots of rank 0"
    assert (unit.send_rows, unit.receive_rows) == ([4, 2], [4, 3])
    assert (sizes.send_pairs, sizes.receive_pairs) == ([5, 2], [5, 3])


def test_segments_of_a_slot_stand_together() -> None:
    segments = Sizes(TABLE, SLOTS, 0, exchange_shape(2, group_size=2, blocking=True)).segments()
    assert segments.length.tolist() == [4, 1, 0, 3], "source by source, slot by slot"
    assert segments.arrival.tolist() == [0, 4, 5, 5]
    assert segments.goes_to.tolist() == [0, 4, 4, 5], "slot by slot, source by source"
    assert segments.row_shift.tolist() == [0, 0, 4, 4]


def test_a_rank_without_slots_has_no_segments() -> None:
    sizes = Sizes([[1, 1, 0], [2, 2, 0]], [0, 1, 1], 1, exchange_shape(2, group_size=2, blocking=True))
    assert sizes.segments().table().shape == (6, 0)


def test_rows_are_cut_alike_in_both_directions() -> None:
    shape = exchange_shape(2, group_size=1, chunks=3)
    assert meetings(shape, 0).cuts == (shape.own_chunks, 3)
    assert meetings(shape, 1).cuts == (3, shape.own_chunks)
