"""The solver's answer fits, is never worse than its start, and its absence is explained."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from strategies import zipf_counts

from moeclipse.balance.objective import PlacementCosts, nodes_of
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.problem import PlanProblem, fitted
from moeclipse.balance.solve import LinearProgram, polish
from moeclipse.core.errors import ConfigError

COSTS = PlacementCosts.from_shapes(d_model=2048, d_ff=1408)


def asked_for(
    num_experts: int, slots_P: tuple[int, ...], nodes: int = 1, **changes: Any
) -> tuple[PlanProblem, Placement]:
    """A problem with Zipf loads, and what wrap-fill says to it."""
    num_ranks = len(slots_P)
    problem = PlanProblem(
        counts_PE=zipf_counts(num_ranks, num_experts, 1.2, tokens=32768),
        slots_P=slots_P,
        current=Placement.contiguous(num_experts, num_ranks),
        costs=replace(COSTS, **changes),
        node_P=nodes_of(num_ranks, nodes),
    )
    config = PlanConfig(planner="wrap_fill")
    args = (problem.counts_PE, slots_P, problem.current, problem.costs, problem.node_P)
    return problem, plan(config, *args)


@pytest.mark.parametrize(
    ("nodes", "wires"),
    [(1, {}), (2, {}), (1, {"shared_wire": True}), (2, {"card_per_rank": True})],
)
def test_a_placement_is_a_feasible_guess_and_costs_what_the_judge_says(
    nodes: int, wires: dict[str, Any]
) -> None:
    problem, _ = asked_for(12, (5,) * 4, nodes, **wires)
    start = fitted(problem.current.with_replicas([(0, (1,)), (11, (0, 1))]), problem.slots_P)
    program = LinearProgram.of(problem)
    guess = program.guess(start)
    values = np.bincount(program.row, program.value * guess[program.column], len(program.lower))
    assert (values >= program.lower - 1e-6).all()
    assert (values <= program.upper + 1e-6).all()
    assert (guess <= program.most + 1e-9).all()
    assert guess[: program.num_binary].sum() == start.num_replicas
    # Rows inside a node are known by node only.
    mean_seconds = problem.costs.row_seconds * float(problem.load_E.sum()) / 4
    seconds = problem.judge(start).total
    assert program.cost @ guess * mean_seconds == pytest.approx(seconds, rel=0.02 if nodes == 1 else 0.1)


def test_the_polish_is_never_slower_than_its_start() -> None:
    pytest.importorskip("highspy")
    problem, start = asked_for(16, (6,) * 4)
    polished = polish(problem, start, time_limit=3.0)
    assert [len(row) for row in polished.slots] == [6] * 4
    assert problem.judge(polished).total < problem.judge(start).total
    assert problem.judge(polished).balance > 0.97


def test_the_polish_knows_nodes() -> None:
    """Links between nodes a hundred times slower: rows stay inside, whatever that does to balance."""
    pytest.importorskip("highspy")
    problem, start = asked_for(8, (4,) * 4, 2, far_bandwidth=COSTS.far_bandwidth / 100)
    polished = polish(problem, start, time_limit=3.0)
    assert problem.judge(polished).total <= problem.judge(start).total
    assert problem.judge(polished).cross <= problem.judge(start).cross


def test_no_time_leaves_the_start() -> None:
    pytest.importorskip("highspy")
    problem, start = asked_for(64, (10,) * 8)
    polished = polish(problem, start, time_limit=0.01)
    assert problem.judge(polished).total <= problem.judge(start).total


def test_a_missing_solver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    problem, start = asked_for(4, (2, 2))
    with pytest.raises(ConfigError, match=r"neither highspy nor .* run: pip install 'moeclipse\[solver\]'"):
        polish(problem, start)


def test_tight_slots_are_respected() -> None:
    """Replicas would help, but there is only one slot for them."""
    pytest.importorskip("highspy")
    problem, _ = asked_for(8, (3, 2, 2, 2))
    polished = polish(problem, problem.start, time_limit=3.0)
    assert all(len(held) <= count for held, count in zip(polished.held, (3, 2, 2, 2), strict=True))
    assert polished.num_replicas <= 9
