"""The search that moves little keeps its budget, and goes down the seconds of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FREE, asked, check_fits, problems

from moeclipse.balance.draft import Draft
from moeclipse.balance.incremental import STEP, improved, search
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import expected_balance
from moeclipse.balance.replicate import plan_random, plan_wrap_fill


@settings(deadline=None)
@given(problems(), st.integers(0, 8), st.integers(0, 9))
def test_a_search_keeps_its_budget(
    problem: tuple[np.ndarray, tuple[int, ...]], max_moves: int, seed: int
) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    begin = Draft.of(current, asked(counts_PE, slots_P, current, noise=0.02))
    found = improved(begin, max_moves, 200)
    new = found.placement()
    check_fits(new, counts_PE.shape[1], slots_P)
    assert sum(move.weights for move in current.moves(new)) <= max_moves
    assert found.seconds <= begin.seconds


def test_few_moves_repair_a_drifted_placement() -> None:
    rng = np.random.default_rng(3)
    weight = rng.permutation(np.arange(1, 65) ** -1.2)
    load_E = weight / weight.sum() * 1e6
    current = plan_wrap_fill(load_E, (5,) * 16)
    drifted = load_E * np.exp(rng.normal(0, 0.4, 64))
    begin = Draft.of(current, asked(np.tile(drifted / 16, (16, 1)), (5,) * 16, current))
    new = improved(begin, 8, 400).placement()
    moves = [move for move in current.moves(new) if move.weights]
    assert 0 < len(moves) <= 8
    assert expected_balance(new, drifted) > expected_balance(current, drifted) + 0.03


def test_optimizer_state_must_pay_for_its_move() -> None:
    """Two experts that change places take master weights and moments along: six times their weights."""
    current, counts_PE = Placement.contiguous(4, 2), np.array([[10.0, 10.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])

    def found(every: int, state_bytes: float) -> Placement:
        costs = replace(FREE, state_bytes=state_bytes, every=every)
        return improved(Draft.of(current, asked(counts_PE, (2, 2), current, costs)), 4, 200).placement()

    assert found(50, 0.0) != current
    assert found(50, 1e6) == current
    assert found(10**7, 1e6) != current


def test_tries_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that could go on ends where its tries do, at a step's end."""
    tried = []
    trial = Draft.trial
    monkeypatch.setattr(Draft, "trial", lambda draft, change: tried.append(change) or trial(draft, change))
    current = plan_random(128, (5,) * 32, 1)
    counts_PE = np.tile(np.arange(1.0, 129.0), (32, 1))
    begin = Draft.of(current, asked(counts_PE, (5,) * 32, current))
    found = []
    for max_tries in (STEP - 1, 3 * STEP, 12 * STEP):
        tried.clear()
        search(begin, 100, max_tries)
        assert len(tried) <= max_tries
        found.append(len(tried))
    assert found[0] == 0 < found[1] < found[2]


def test_without_moves_there_is_nothing_to_search() -> None:
    current = Placement.parse([[0, 1], [2, 3]])
    counts_PE = np.array([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    draft = Draft.of(current, asked(counts_PE, (2, 2), current))
    assert search(draft, 0, 20) == []
    assert search(draft, 2, 0) == []
    assert search(draft, 2, 20)[-1].level == [5.0, 5.0], "two experts change places"


def test_a_replica_that_costs_more_than_it_carries_is_given_up() -> None:
    """Gradients of a replica travel in every step: with few rows its slot is better left empty."""
    current = Placement.parse([[0, 1], [1, 0]])
    counts_PE = np.array([[6.0, 0.0], [0.0, 6.0]])
    dear = replace(FREE, gradient_bytes=10.0)
    found = improved(Draft.of(current, asked(counts_PE, (2, 2), current, dear)), 0, 200).placement()
    assert found.num_replicas == 2
    cheap = replace(FREE, gradient_bytes=1e-9)
    counts_PE = np.array([[9.0, 0.0], [0.0, 3.0]])
    kept = improved(Draft.of(current, asked(counts_PE, (2, 2), current, cheap)), 0, 200).placement()
    assert kept.num_replicas >= 3, "the hot expert stands on both"
