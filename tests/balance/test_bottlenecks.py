"""Bounds are those of the best split, books stay true, and tables that are found bear loads that may come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FREE
from strategies import placements

from moeclipse.balance.bottlenecks import (
    BATCHES,
    FEWEST_BATCHES,
    FINALISTS,
    TOGETHER,
    Walk,
    batches_for,
    steadied,
    tight_ranks,
)
from moeclipse.balance.config import padded
from moeclipse.balance.draft import Draft
from moeclipse.balance.incremental import improved
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, answer, wrap_filled
from moeclipse.balance.problem import PlanProblem

NOISE = 0.15
SEEN = (
    (
        2.46,
        2.25,
        1.58,
        1.49,
        1.39,
        1.38,
        1.33,
        1.17,
        0.89,
        0.85,
        0.25,
        0.24,
        0.19,
        0.13,
        0.1,
        0.08,
        0.07,
        0.07,
    ),
    (
        3.24,
        2.97,
        2.01,
        1.69,
        1.56,
        0.86,
        0.49,
        0.47,
        0.44,
        0.43,
        0.43,
        0.21,
        0.16,
        0.15,
        0.15,
        0.15,
        0.12,
        0.11,
    ),
)
"""Experts of two layers that were trained without a balance loss, in mean loads of a rank."""


def asked(placement: Placement, load_E: np.ndarray, noise: float = NOISE) -> PlanProblem:
    num_ranks = placement.num_ranks
    counts_PE = np.repeat(load_E[None] / num_ranks, num_ranks, axis=0)
    slots_P = tuple(len(row) for row in placement.slots)
    costs = replace(FREE, row_seconds=1.0)
    return PlanProblem(counts_PE=counts_PE, slots_P=slots_P, current=placement, costs=costs, noise=noise)


def some_loads(data: st.DataObject, num_experts: int) -> np.ndarray:
    return np.array(data.draw(st.lists(st.integers(1, 1000), min_size=num_experts, max_size=num_experts)))


def bound_of(load_E: np.ndarray, holders: list[tuple[int, ...]], ranks: int) -> float:
    """What one set of ranks cannot hand on, for each of them."""
    inside = [all(ranks >> rank & 1 for rank in mine) for mine in holders]
    return float(load_E[inside].sum()) / ranks.bit_count()


@settings(deadline=None)
@given(st.data())
def test_the_tight_set_says_how_full_the_fullest_rank_is(data: st.DataObject) -> None:
    placement = data.draw(placements())
    load_E = some_loads(data, placement.num_experts).astype(float)
    draft = Draft.of(placement, asked(placement, load_E))
    all_sets = range(1, 1 << placement.num_ranks)
    for pool in draft.pools:
        loads_E, holders = np.array(pool.loads), draft.holders
        most = max(bound_of(loads_E, holders, ranks) for ranks in all_sets)
        assert max(pool.level) >= most * (1 - 1e-9), "no split is better than the largest bound"
        tight = tight_ranks(draft, pool)
        assert tight >> pool.level.index(max(pool.level)) & 1
        if max(pool.level) <= most * 1.001:  # poured to the end
            assert bound_of(loads_E, holders, tight) == pytest.approx(most, rel=0.02)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_books_of_a_walk_stay_true(data: st.DataObject) -> None:
    current = data.draw(placements())
    placement = padded(current, current.max_slots + 1)
    draft = Draft.of(placement, asked(placement, some_loads(data, placement.num_experts)))
    walk = Walk(draft)
    assert walk.copies == 0
    for _ in range(12):
        changes = walk._guesses(16)
        prices = walk._prices(changes)
        if not len(prices):
            continue
        chosen = data.draw(st.integers(0, len(prices) - 1))
        walk._take(changes, chosen)
        assert walk.price == pytest.approx(prices[chosen]), "a price is that of the table which it leads to"
        found = walk.placement()
        assert all(len(set(row)) == len(row) for row in found.held), "none stands twice on a rank"
        assert all(found.holders)
        assert len(found.holders) == current.num_experts, "none is lost"
        assert walk.copies == sum(move.weights for move in placement.moves(found))
        walk.widen()
        assert walk.price >= prices[chosen] - 1e-9, "what is learned only adds bounds"
        assert len(set(walk.set_C.tolist())) == len(walk.set_C)
        loads_KE = walk.load_KE[:, :-1]
        for loads_E, bound_C in zip(loads_KE, walk.bound_KC, strict=True):
            expected = [bound_of(loads_E, list(found.holders), ranks) for ranks in walk.set_C.tolist()]
            assert np.allclose(bound_C, expected)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_what_is_found_is_never_slower(data: st.DataObject) -> None:
    placement = data.draw(placements())
    load_E = some_loads(data, placement.num_experts)
    draft = Draft.of(placement, asked(placement, load_E))
    found = steadied(draft)
    assert found.seconds <= draft.seconds
    assert found.placement() == steadied(draft).placement(), "it repeats"
    assert [len(row) for row in found.slots] == [len(row) for row in draft.slots]
    assert all(found.holders), "no expert is lost"


def skewed(num_experts: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.rint(8192 * rng.permutation(np.arange(1, num_experts + 1) ** -1.1)) + 1


def fullest(draft: Draft) -> float:
    """Over all loads, in means."""
    return float(np.mean([max(pool.level) * len(pool.level) / sum(pool.level) for pool in draft.pools]))


@pytest.mark.parametrize("parts", SEEN)
def test_loads_that_may_come_are_borne(parts: tuple[float, ...]) -> None:
    """32 experts on 16 ranks with 3 slots: a table that is perfect on average, and what becomes of it."""
    current = padded(Placement.contiguous(32, 16), 3)
    load_E = np.full(32, 1.0)
    load_E[: len(parts)] += 2048 * np.array(parts)
    problem = asked(current, load_E)
    start = Draft.of(wrap_filled(problem, problem.slots_P), problem)
    before = improved(start, problem.num_slots, 300)
    after = steadied(before)
    assert fullest(after) <= fullest(before)
    assert fullest(after) < 1 + 0.1 * (fullest(start) - 1) < 1.01
    taken = answer(PlanConfig(noise=NOISE, turnover=0.0, max_moved=1.0), problem)
    assert fullest(Draft.of(taken, problem)) < 1.015, "planners make use of it"


def test_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of changes, so that a plan takes as long on loads that are hard."""
    tried = []
    guesses = Walk._guesses
    monkeypatch.setattr(Walk, "_guesses", lambda walk, tries: tried.append(tries) or guesses(walk, tries))
    for slots, most in ((2, FEWEST_BATCHES), (3, BATCHES)):
        tried.clear()
        current = padded(Placement.contiguous(32, 16), slots)
        problem = asked(current, skewed(32, 1))
        steadied(Draft.of(current, problem))
        assert 0 < len(tried) <= most == batches_for(problem)
        assert set(tried) == {TOGETHER}


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_what_is_sifted_out_of_guesses_is_judged_as_all_are(data: st.DataObject) -> None:
    placement = data.draw(placements())
    walk = Walk(Draft.of(placement, asked(placement, some_loads(data, placement.num_experts))))
    changes = walk._guesses(64)
    prices, sifted = walk._prices(changes), walk._sifted(changes)
    assert len(sifted.x_B) == min(len(prices), FINALISTS)
    at = [
        np.flatnonzero((changes.x_B == x) & (changes.put_B == put))
        for x, put in zip(sifted.x_B, sifted.put_B, strict=True)
    ]
    for same, price in zip(at, walk._prices(sifted), strict=True):
        assert np.isclose(prices[same], price).any()


def test_nothing_is_done_where_nothing_may_come() -> None:
    current = padded(Placement.contiguous(8, 4), 3)
    draft = Draft.of(current, asked(current, skewed(8, 0), noise=0.0))
    assert steadied(draft) is draft
    many = Placement.contiguous(64, 64)
    assert (wide := Draft.of(many, asked(many, skewed(64, 0)))) is steadied(wide), "sets are bits of a word"
