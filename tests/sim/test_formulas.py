"""Bubble formulas hold exactly inside their domain, and are known to fail outside it.

docs/schedules.md states these domains; the grid here is what they were read from.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moeclipse.cost.model import UNIT, Costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.legal import broken_rules
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import Summary, summarise

COSTS = [(F, I, W) for F in (1, 2, 3) for I in (1, 2, 3) for W in (1, 2, 3)]
SIZES = [(P, M) for P in (1, 2, 3, 4, 8) for M in (1, 3, 4, 8, 9, 16)]


def timed(verified: Verified, F: float, I: float, W: float, FB: float | None = None) -> Summary:
    pair = F + I + W if FB is None else FB
    costs = Costs(seconds={"F": F, "I": I, "W": W, "B": I + W, "PAIR": pair})
    return summarise(simulate(verified, costs))


def measured(
    name: str, P: int, M: int, V: int, F: float, I: float, W: float, FB: float | None = None
) -> Summary:
    return timed(verify(build(name, P, M, V)), F, I, W, FB)


def inside_and_outside(
    name: str,
    V: int,
    formula: Callable[[int, float, float, float], float],
    domain: Callable[[int, int, float, float, float], bool],
) -> tuple[int, int]:
    """Assert the formula in its domain; count agreements and disagreements outside."""
    inside = wrong_outside = 0
    for P, M in SIZES:
        if broken_rules(name, P, M, V):
            continue
        verified = verify(build(name, P, M, V))
        for F, I, W in COSTS:
            bubble = timed(verified, F, I, W).bubble
            expected = formula(P, F, I, W)
            if domain(P, M, F, I, W):
                assert bubble == pytest.approx(expected), (name, P, M, V, F, I, W)
                inside += 1
            elif bubble != pytest.approx(expected):
                wrong_outside += 1
    return inside, wrong_outside


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b-pairs"])
def test_one_stage_per_rank_always(name: str) -> None:
    """(P-1)(F+B), for any number of microbatches and any costs; pairs with FB = F+B."""
    inside, _ = inside_and_outside(name, 1, lambda P, F, I, W: (P - 1) * (F + I + W), lambda *_: True)
    assert inside == len(SIZES) * len(COSTS)


@pytest.mark.parametrize("name", ["vpp", "vpp+1"])
@pytest.mark.parametrize("V", [2, 3])
def test_interleaving_divides_the_bubble_from_as_many_microbatches_as_ranks(name: str, V: int) -> None:
    """(P-1)(F+B) with F and B of one stage, which is 1/V of a rank; needs M >= P."""
    formula = lambda P, F, I, W: (P - 1) * (F + I + W)  # noqa: E731
    inside, wrong = inside_and_outside(name, V, formula, lambda P, M, F, I, W: M >= P)
    assert inside > 200
    assert wrong > 0


def test_zb_h1() -> None:
    """(P-1)(F+I-W), as long as M >= P and W is no longer than F and I."""
    formula = lambda P, F, I, W: (P - 1) * (F + I - W)  # noqa: E731
    domain = lambda P, M, F, I, W: M >= P and min(F, I) >= W  # noqa: E731
    inside, wrong = inside_and_outside("zb-h1", 1, formula, domain)
    assert inside > 200
    assert wrong > 0


@pytest.mark.parametrize(("name", "half"), [("dualpipe", 2), ("dualpipev", 1)])
def test_dualpipe(name: str, half: int) -> None:
    """(P/2-1)(FB+B-3W), and (P-1)(FB+B-3W) folded: exact where I = F and W <= F, and not elsewhere."""
    formula = lambda P, F, I, W: (P / half - 1) * (F + I + W + I + W - 3 * W)  # noqa: E731
    inside, wrong = inside_and_outside(name, 2, formula, lambda P, M, F, I, W: F == I and W <= F)
    assert inside >= 24
    assert wrong > 50


@pytest.mark.parametrize("FB", [2.0, 2.5, 3.0])
def test_dualpipe_with_a_cheaper_pair(FB: float) -> None:
    """The formula then is that of the worst rank."""
    for name, P, M, place in [("dualpipe", 8, 20, 3), ("dualpipev", 4, 10, 3), ("dualpipev", 8, 20, 7)]:
        assert measured(name, P, M, 2, 1, 1, 1, FB).bubble == pytest.approx(place * (FB + 2 - 3))


def test_zb_v_is_locally_free_of_bubbles() -> None:
    """With F = I = W and at least 2P-1 microbatches no rank ever waits between its first and last op."""
    for P, M in [(2, 3), (4, 7), (4, 16), (8, 15), (8, 32)]:
        summary = measured("zb-v", P, M, 2, 1, 1, 1)
        assert all(rank.local_bubble == pytest.approx(0.0) for rank in summary.ranks)
    assert any(rank.local_bubble > 0 for rank in measured("zb-v", 4, 16, 2, 1, 2, 1).ranks)


@pytest.mark.parametrize(("name", "makespan"), [("1f1b", 81), ("zb-h1", 67), ("dualpipe", 66)])
def test_the_drawn_example(name: str, makespan: float) -> None:
    """P=8, M=20, F=1, B=2, W=1, FB=3."""
    assert UNIT.seconds == {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0, "PAIR": 3.0}
    assert simulate(build(name, 8, 20), UNIT).makespan == pytest.approx(makespan)


def test_the_extra_warm_up_costs_no_bubble() -> None:
    """VPP+1 against VPP over a grid, at equal cost of paired and single work and with cheaper pairs."""
    compared = 0
    for P, M in SIZES:
        for V in (1, 2, 3, 4):
            if broken_rules("vpp", P, M, V):
                continue
            plain = measured("vpp", P, M, V, 1, 1, 1).bubble
            assert measured("vpp+1", P, M, V, 1, 1, 1).bubble <= plain + 1e-9, (P, M, V)
            compared += 1
    assert compared > 60


def test_one_warm_up_per_hop_plus_one_is_not_enough_for_pairs() -> None:
    """1F1B with a single extra forward runs when fused, but its bubble explodes; two per hop restore it."""
    from moeclipse.schedule.one_f_one_b import paired_rank
    from moeclipse.schedule.op import pipeline_program
    from moeclipse.schedule.shape import StagePlacement

    for P, M, bubble in [(4, 12, 39), (8, 20, 75)]:
        ranks = [paired_rank(r, P - r, M) for r in range(P)]
        program = pipeline_program("1f1b+1", ranks, StagePlacement.loop(P), M)
        assert summarise(simulate(program, UNIT)).bubble == pytest.approx(bubble)
        assert summarise(simulate(build("1f1b-pairs", P, M), UNIT)).bubble == pytest.approx((P - 1) * 3)
