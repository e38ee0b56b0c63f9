"""The planner that moves little keeps its budget, and moves only what pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FREE, check_fits, problems

from moeclipse.balance.draft import Draft
from moeclipse.balance.incremental import plan_incremental, search
from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import expected_balance
from moeclipse.balance.replicate import plan_random, plan_wrap_fill


@settings(deadline=None)
@given(problems(), st.integers(0, 8), st.integers(0, 9))
def test_incremental_keeps_its_budget(
    problem: tuple[np.ndarray, tuple[int, ...]], max_moves: int, seed: int
) -> None:
    counts_PE, slots_P = problem
    load_E = counts_PE.sum(0)
    current = plan_random(len(load_E), slots_P, seed)
    new = plan_incremental(load_E, current, FREE, max_moves=max_moves, noise=0.02)
    check_fits(new, len(load_E), slots_P)
    assert sum(move.weights for move in current.moves(new)) <= max_moves
    if new != current:
        assert expected_balance(new, load_E) > expected_balance(current, load_E) - 0.05


def test_a_dear_migration_is_not_made() -> None:
    load_E = np.array([900.0, 100.0, 100.0, 100.0])
    current = Placement.parse([[0, 1], [2, 3]])
    moved = plan_incremental(load_E, current, FREE, max_moves=4, slots_P=[3, 3])
    assert expected_balance(moved, load_E) > 0.95
    dear = PlacementCosts(
        row_seconds=1e-9,
        row_bytes=0,
        weight_bytes=1e9,
        gradient_bytes=0,
        state_bytes=1e10,
        near_bandwidth=1e9,
        far_bandwidth=1e9,
    )
    assert plan_incremental(load_E, current, dear, max_moves=4, slots_P=[3, 3]) is current


def test_few_moves_repair_a_drifted_placement() -> None:
    rng = np.random.default_rng(3)
    weight = rng.permutation(np.arange(1, 65) ** -1.2)
    load_E = weight / weight.sum() * 1e6
    current = plan_wrap_fill(load_E, (5,) * 16)
    drifted = load_E * np.exp(rng.normal(0, 0.4, 64))
    new = plan_incremental(drifted, current, FREE, max_moves=8)
    moves = [move for move in current.moves(new) if move.weights]
    assert 0 < len(moves) <= 8
    assert expected_balance(new, drifted) > expected_balance(current, drifted) + 0.03


def test_optimizer_state_must_pay_for_its_move() -> None:
    """Two experts that change places take master weights and moments along: six times their weights."""
    current, load_E = Placement.contiguous(4, 2), np.array([10.0, 10.0, 1.0, 1.0])
    assert replace(FREE, weight_bytes=2.0, state_bytes=12.0).move_seconds(3, 2) == 3 * 2 + 2 * 12
    assert plan_incremental(load_E, current, FREE, max_moves=4) != current
    dear = replace(FREE, state_bytes=1e6)
    assert plan_incremental(load_E, current, dear, max_moves=4) is current
    patient = replace(dear, every=10**7)
    assert plan_incremental(load_E, current, patient, max_moves=4) != current


def test_without_moves_there_is_nothing_to_search() -> None:
    placement = Placement.parse([[0, 1], [2, 3]])
    draft = Draft.of(placement, [2, 2], np.array([4.0, 3.0, 2.0, 1.0]), 0.0)
    assert search(draft, 0) == []
    (after, moves) = search(draft, 2)[-1]
    assert (after.level, moves) == ([5.0, 5.0], 2), "two experts change places"
