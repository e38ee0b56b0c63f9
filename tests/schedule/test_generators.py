"""Every generator passes the verifier wherever it is legal, and holds what its table says."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.legal import SCHEDULES, broken_rules, nearest_legal
from moeclipse.schedule.lower import lower

RANKS = range(1, 17)
STAGES = range(1, 5)


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


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_generator_passes_the_verifier(name: str) -> None:
    assert sweep(name, (1, 2, 3, 8, 12, 33, 64)) >= (7 if name == "pp1" else 12)


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_generator_passes_the_verifier_everywhere(name: str) -> None:
    assert sweep(name, range(1, 65)) >= 64


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("P", "M"), [(1, 4), (2, 6), (4, 8), (4, 13), (6, 12)])
def test_lowered_programs_pass_op_by_op(name: str, P: int, M: int) -> None:
    for V in (1, 2, 3):
        if not broken_rules(name, P, M, V):
            verify(lower(build(name, P, M, V)))
            verify(lower(build(name, P, M, V), reduce=True))


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
    with pytest.raises(ScheduleError, match=r"ranks=4, microbatches=10.*ranks=4, microbatches=12"):
        build("vpp", 4, 11)
    with pytest.raises(ScheduleError, match="did you mean 'dualpipev'"):
        build("dualpipe-v", 4, 8)


@pytest.mark.parametrize(
    ("name", "P", "M", "V", "peaks"),
    [
        ("gpipe", 4, 8, 1, [8, 8, 8, 8]),
        ("1f1b", 4, 8, 1, [4, 3, 2, 1]),
        ("1f1b-pairs", 4, 12, 1, [8, 6, 4, 2]),
        ("zb-h1", 4, 8, 1, [4, 4, 4, 4]),
        ("vpp", 4, 8, 2, [11, 9, 7, 5]),
        ("vpp+1", 4, 8, 2, [12, 10, 8, 6]),
        ("zb-v", 4, 12, 2, [8, 8, 8, 8]),
        ("dualpipe", 4, 12, 2, [5, 5, 5, 5]),
        ("dualpipev", 4, 12, 2, [9, 9, 9, 9]),
        ("pp1", 1, 8, 1, [2]),
    ],
)
def test_peak_memory_is_that_of_the_table(name: str, P: int, M: int, V: int, peaks: list[int]) -> None:
    assert list(verify(build(name, P, M, V)).peak) == peaks


def test_pair_counts() -> None:
    """DualPipeV: 2(M-2P+r+1) + (P-r-1) pairs, less the unfused first one at the fold; VPP+1: MV - w."""
    P, M = 4, 10
    pairs = [sum(op.kind is kinds.PAIR for op in ops) for ops in build("dualpipev", P, M).ranks]
    assert (
        pairs == [2 * (M - 2 * P + r + 1) + (P - r - 1) - (r == P - 1) for r in range(P)] == [9, 10, 11, 11]
    )
    pairs = [sum(op.kind is kinds.PAIR for op in ops) for ops in build("vpp+1", 4, 8, 2).ranks]
    assert pairs == [5, 7, 9, 11]
    pairs = [sum(op.kind is kinds.PAIR for op in ops) for ops in build("pp1", 1, 6).ranks]
    assert pairs == [5]


def test_small_programs_by_hand() -> None:
    assert [" ".join(map(str, ops)) for ops in build("1f1b", 2, 3).ranks] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert [" ".join(map(str, ops)) for ops in build("zb-h1", 2, 3).ranks] == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert [" ".join(map(str, ops)) for ops in build("pp1", 1, 3).ranks] == ["0F0 (0F1;0B0) (0F2;0B1) 0B2"]
