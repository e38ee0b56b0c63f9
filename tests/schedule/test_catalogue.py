"""Every schedule of the catalogue passes the verifier wherever it is legal."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.catalogue import IN_GROUPS, MANY_STAGES, ONE_STAGE, build
from moeclipse.schedule.check import verify
from moeclipse.schedule.legal import SCHEDULES, broken_rules
from moeclipse.schedule.lower import lower

RANKS = range(1, 17)
STAGES = range(1, 5)
SOME = (1, 2, 3, 8, 12, 33, 64)
"""Numbers of microbatches, where all of them would take too long."""


def sweep(name: str, microbatches: range | tuple[int, ...]) -> int:
    done = 0
    for P in RANKS:
        for M in microbatches:
            for V in STAGES:
                if broken_rules(name, P, M, V):
                    with pytest.raises(ScheduleError, match="nearest legal: ranks="):
                        build(name, P, M, V)
                else:
                    verify(build(name, P, M, V))
                    done += 1
    return done


def test_a_generator_passes_the_verifier() -> None:
    assert sweep("zb-h2", SOME) >= 12


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_generator_passes_the_verifier_everywhere(name: str) -> None:
    searched = name == "zb-m"  # takes any number of stages, and looks for each order
    assert sweep(name, SOME if searched else range(1, 65)) >= 64


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("P", "M"), [(1, 4), (2, 6), (4, 8), (4, 13), (6, 12)])
def test_lowered_programs_pass_op_by_op(name: str, P: int, M: int) -> None:
    for V in (1, 2, 3):
        if not broken_rules(name, P, M, V):
            verify(lower(build(name, P, M, V)))
            verify(lower(build(name, P, M, V), reduce=True))


def test_names_are_those_of_the_rules_and_typing_errors_are_understood() -> None:
    assert {*ONE_STAGE, *MANY_STAGES, *IN_GROUPS, "zb-m"} == set(SCHEDULES)
    assert build("vpp", 2, 4) == build("vpp", 2, 4, 2), "what a schedule takes when nobody says"
    with pytest.raises(ScheduleError, match="unknown schedule 'dualpipe-v'; did you mean 'dualpipev'"):
        build("dualpipe-v", 4, 8)
    with pytest.raises(ScheduleError, match="unknown schedule 'xyz'; choose one of gpipe, 1f1b"):
        build("xyz", 4, 8)
