"""The solver's answer fits, is never worse than its start, and its absence is explained."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from strategies import zipf_counts

from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, expected_balance, plan
from moeclipse.balance.solve import LinearProgram, polish
from moeclipse.core.errors import ConfigError

COSTS = PlacementCosts.from_shapes(d_model=2048, d_ff=1408)


def check_feasible(program: LinearProgram, columns: np.ndarray) -> None:
    values = np.bincount(program.row, program.value * columns[program.column], len(program.lower))
    assert (values >= program.lower - 1e-6).all()
    assert (values <= program.upper + 1e-6).all()


def test_a_placement_is_a_feasible_guess() -> None:
    counts_PE = zipf_counts(4, 12, 1.2)
    current = Placement.contiguous(12, 4)
    program = LinearProgram.of(counts_PE.sum(0), (5,) * 4, current, COSTS)
    start = plan(PlanConfig(planner="wrap_fill"), counts_PE, (5,) * 4, current, COSTS)
    guess = program.guess(start)
    check_feasible(program, guess)
    assert 1 / guess[-1] == pytest.approx(expected_balance(start, counts_PE.sum(0)), rel=1e-3)
    assert guess[: program.num_binary].sum() == start.num_replicas


def test_the_polish_moves_less_for_the_same_balance() -> None:
    pytest.importorskip("highspy")
    counts_PE = zipf_counts(4, 16, 1.2, tokens=32768)
    load_E, slots_P = counts_PE.sum(0), (6,) * 4
    current = Placement.contiguous(16, 4)
    start = plan(PlanConfig(planner="wrap_fill"), counts_PE, slots_P, current, COSTS)
    polished = polish(load_E, slots_P, current, start, COSTS, time_limit=5.0)
    assert [len(row) for row in polished.slots] == [6] * 4
    assert expected_balance(polished, load_E) > 0.99
    moves = [sum(m.weights + 6 * m.state for m in current.moves(p)) for p in (start, polished)]
    assert moves[1] < moves[0]
    program = LinearProgram.of(load_E, slots_P, current, COSTS)
    assert program.cost @ program.guess(polished) <= program.cost @ program.guess(start)


def test_no_time_leaves_the_start() -> None:
    pytest.importorskip("highspy")
    counts_PE = zipf_counts(8, 64, 1.2)
    current = Placement.contiguous(64, 8)
    start = plan(PlanConfig(planner="wrap_fill"), counts_PE, (10,) * 8, current, COSTS)
    polished = polish(counts_PE.sum(0), (10,) * 8, current, start, COSTS, time_limit=0.01)
    program = LinearProgram.of(counts_PE.sum(0), (10,) * 8, current, COSTS)
    assert program.cost @ program.guess(polished) <= program.cost @ program.guess(start) + 1e-9


def test_a_missing_solver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    current = Placement.contiguous(4, 2)
    with pytest.raises(ConfigError, match=r"neither highspy nor .* run: pip install 'moeclipse\[solver\]'"):
        polish(np.ones(4), (2, 2), current, current, COSTS)


def test_tight_slots_are_respected() -> None:
    """Replicas would help, but there is no slot for them."""
    pytest.importorskip("highspy")
    counts_PE = zipf_counts(4, 8, 1.2, tokens=32768)
    current = Placement.contiguous(8, 4)
    polished = polish(counts_PE.sum(0), (3, 2, 2, 2), current, current, COSTS, time_limit=5.0)
    assert all(len(held) <= count for held, count in zip(polished.held, (3, 2, 2, 2), strict=True))
    assert polished.num_replicas == 9
