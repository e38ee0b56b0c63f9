"""Which numbers of ranks a run can go on with, and what becomes of its layout."""

from __future__ import annotations

from typing import Any

import pytest

from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.elastic import RankRange, largest, layout_for, possible, range_problems


def configure(**changes: Any) -> TrainConfig:
    return with_values(TrainConfig(), {key.replace("_", ".", 1): value for key, value in changes.items()})


def problems(text: str, host: int = 0, **changes: Any) -> list[str]:
    ranks = RankRange.read(text)
    assert ranks is not None
    return list(range_problems(configure(**changes), ranks, host))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", (4, 4)), ("2:4", (2, 4)), ("auto", (0, 0)), ("0", (0, 0)), ("4:2", (4, 2))],
)
def test_a_range(text: str, expected: tuple[int, int]) -> None:
    ranks = RankRange.read(text)
    assert ranks is not None
    assert (ranks.least, ranks.most, ranks.changes) == (*expected, text == "2:4")


@pytest.mark.parametrize("text", ["two", "2:", ":4", "2:4:6", "-1", "2-4", "1" * 9, ""])
def test_what_is_no_range(text: str) -> None:
    assert RankRange.read(text) is None


def test_dp_follows_and_what_was_written_down_stays() -> None:
    config = configure(parallel_dp=2, parallel_ep=2, parallel_tp=2)
    assert layout_for(config, 8, 8) is config
    parallel = layout_for(config, 4, 8).parallel
    assert (parallel.dp, parallel.ep, parallel.tp) == ("auto", 2, 2)
    assert parallel.sizes(4, 8) == (1, 2)


def test_numbers_that_a_layout_fits() -> None:
    assert possible(configure(), RankRange(least=1, most=5)) == [1, 2, 3, 4, 5]
    assert possible(configure(parallel_tp=2), RankRange(least=2, most=6)) == [2, 4, 6]
    assert possible(configure(parallel_ep=2, parallel_dp=3), RankRange(least=2, most=6)) == [2, 4, 6]
    assert (largest([2, 4], 3), largest([2, 4], 1)) == (2, 0)


def test_layouts_that_cannot_shrink_are_refused() -> None:
    assert problems("2:4") == problems("2:2") == problems("3:4", parallel_ep=3) == []
    (told,) = problems("3:4", parallel_tp=2)
    assert told == (
        "ranks (3:4): with 3 of them parallel.tp (2) must divide the number of ranks (3); choose 1, 3"
    )
    (told,) = problems("2:4", parallel_pp=4, pipeline_schedule="1f1b", optim_accumulate=4)
    assert told.startswith("ranks (2:4): with 2 of them parallel.pp (4) must divide the number of ranks (2)")
    (told,) = problems("1:2", placement_slots=((0, 1, 2, 3), (4, 5, 6, 7)), placement_planner="static")
    assert "ranks (1:2): with 1 of them placement.slots" in told


def test_hosts_come_and_go_as_a_whole() -> None:
    assert problems("2:6", host=2, parallel_tp=2) == []
    assert problems("1:2", host=1) == []
    (told,) = problems("2:5", host=2)
    assert told == (
        "ranks (2:5): both must be multiples of 2, the ranks of a host, which come and go together"
    )
    (told,) = problems("2:6", host=2, parallel_ep=2, parallel_tp=1, moe_num_experts=2, parallel_pp=2)
    assert "ranks (2:6): with 2 of them" in told
