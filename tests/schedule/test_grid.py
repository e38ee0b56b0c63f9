"""The grid of a program."""

from __future__ import annotations

from moeclipse.schedule.catalogue import build
from moeclipse.schedule.grid import format_grid
from moeclipse.schedule.lower import lower


def test_grid_places_actions_in_their_first_slot() -> None:
    assert format_grid(build("1f1b", 2, 2)).splitlines() == [
        "rank 0  0F0 0F1 .   0B0 .   0B1",
        "rank 1  .   1F0 1B0 1F1 1B1 .".rstrip(),
    ]
    assert format_grid(build("1f1b", 2, 4), max_slots=3).splitlines()[0] == "rank 0  0F0 0F1 . ..."
    assert "(0F1;0B0)" in format_grid(build("pp1", 1, 3))
    assert format_grid(lower(build("1f1b", 2, 2))) == format_grid(build("1f1b", 2, 2))
