"""Which settings a schedule accepts, and what it suggests instead of others."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.legal import (
    SCHEDULES,
    broken_rules,
    default_stages_per_rank,
    nearest_legal,
    require_legal,
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_suggestions_are_legal_and_near(name: str) -> None:
    for setting in [(7, 3, 3), (8, 9, 2), (5, 1, 1), (0, 0, 0), (3, 7, 2)]:
        if broken_rules(name, *setting):
            choices = nearest_legal(name, *setting)
            assert choices
            assert all(not broken_rules(name, *choice) for choice in choices)


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(ScheduleError) as caught:
        build("dualpipev", 8, 10)
    message = str(caught.value)
    assert "at least two microbatches per rank" in message
    assert "got ranks=8, microbatches=10" in message
    assert "ranks=8, microbatches=16" in message
    assert "ranks=5, microbatches=10" in message
    with pytest.raises(
        ScheduleError, match=r"even number of ranks.*ranks=6, microbatches=20.*ranks=8, microbatches=20"
    ):
        build("dualpipe", 7, 20)
    with pytest.raises(ScheduleError, match=r"zb-h1 has no groups of microbatches; .* for vpp and vpp"):
        build("zb-h1", 4, 11, group_size=4)
    with pytest.raises(ScheduleError, match="vpp has no budget of activations; that is for zb-m"):
        build("vpp", 4, 11, budget=4)


def test_rules_by_hand() -> None:
    assert broken_rules("dualpipe", 3, 5, 1) == [
        "two stages per rank",
        "an even number of ranks",
        "an even number of microbatches",
        "at least two microbatches per rank",
    ]
    assert broken_rules("dualpipe", 4, 8, 2) == broken_rules("pp1", 1, 3, 1) == []
    assert broken_rules("gpipe", 0, 1, 1) == ["at least one rank, one microbatch and one stage per rank"]
    require_legal("vpp", 4, 10, 3)


def test_stages_per_rank_when_nobody_says() -> None:
    taken = {name: default_stages_per_rank(name) for name in SCHEDULES}
    two = {name for name, stages in taken.items() if stages == 2}
    assert two == {"vpp", "vpp+1", "zb-v", "dualpipe", "dualpipev"}
    assert set(taken.values()) == {1, 2}


def test_suggestions_change_one_number_where_that_is_enough() -> None:
    assert nearest_legal("zb-v", 2, 4, 3) == [(2, 4, 2)]
    assert nearest_legal("pp1", 3, 4, 1) == [(1, 4, 1)]
    assert nearest_legal("dualpipe", 4, 9, 2)[:2] == [(4, 8, 2), (4, 10, 2)], "fewer microbatches, and more"
    assert nearest_legal("dualpipe", 3, 5, 1) == [(4, 8, 2)], "two numbers must change, and stages with them"
