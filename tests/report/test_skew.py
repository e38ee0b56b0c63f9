"""What skew cost, what plans won, what a planner would have won: from files whose answers are known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import CHOICES, PROBE, make_run, write_loads

from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import Placement
from moeclipse.report.gain import cost_of_a_row
from moeclipse.report.run import read_run
from moeclipse.report.skew import (
    Skew,
    outlook,
    probe_of,
    sharers,
    skew_ms,
    skew_of,
)


def told(folder: Path) -> Skew:
    found = skew_of(read_run(folder))
    assert found is not None
    return found


def test_the_cost_is_rows_above_the_mean_at_what_they_cost(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert cost_of_a_row(run) == pytest.approx(0.05)
    # So many rows more than the mean has the fullest of two ranks.
    above = sum(200 - 10 * (step % 7) for step in range(3, 20)) / 17
    assert skew_ms(run) == pytest.approx(0.05 * above)
    found = told(tmp_path / "run")
    assert found.share == pytest.approx(0.05 * above / run.steps.column("step_ms")[3:].mean())
    assert found.in_words() == ["ranks at 0.88, which cost at least 8.41 ms of waiting a step (7 %)"]


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    assert skew_of(read_run(make_run(tmp_path / "one", ranks=1, balance=None))) is None
    short = read_run(make_run(tmp_path / "short", steps=4))
    assert cost_of_a_row(short) is None
    assert told(tmp_path / "short").in_words() == ["ranks at 0.88; what that cost is not known"]
    assert cost_of_a_row(read_run(make_run(tmp_path / "single", ranks=1))) is None


def skewed(folder: Path, exposed_ms: float = 100.0, **choices: Any) -> Path:
    """Two ranks, four experts; three quarters of the rows want those of rank 0."""
    make_run(folder, exposed_ms=exposed_ms)
    write_loads(folder, np.tile(np.array([300, 300, 100, 100]), (20, 1, 1)), 2)
    (folder / "choices.json").write_text(json.dumps({**CHOICES, **choices}))
    return folder


def test_what_a_planner_would_win_follows_from_its_objective(tmp_path: Path) -> None:
    run = read_run(skewed(tmp_path / "run"))
    would = outlook(run)
    assert would is not None
    costs = PlacementCosts.from_measured(PROBE, 50)
    counts_PE = np.array([[150, 150, 50, 50]] * 2)
    now = score(Placement.contiguous(4, 2), counts_PE, costs).total
    step_ms = float(np.mean(run.steps.column("step_ms")[run.window]))
    saved = would.gain_ms / 1e3 / min(1.0, 1e-3 * step_ms / now)
    best = score(Placement.parse([[0, 2], [1, 3]], num_experts=4, num_ranks=2), counts_PE, costs).total
    assert now - saved <= 1.05 * best, "as good as the even table, or better"
    assert would.faster == pytest.approx(step_ms / (step_ms - would.gain_ms))
    assert would.balance > 0.95
    assert "planned placement predicts ranks at" in told(tmp_path / "run").in_words()[-1]
    assert run.kept["outlook"] is outlook(run), "planned once"


def test_no_plan_would_win_more_than_ranks_waited(tmp_path: Path) -> None:
    run = read_run(skewed(tmp_path / "run", exposed_ms=2.0))
    would = outlook(run)
    assert would is not None
    assert would.gain_ms == pytest.approx(2.0 + run.steps.column("straggle_ms")[3:].mean())


def test_copies_of_the_model_share_the_rows(tmp_path: Path) -> None:
    one = outlook(read_run(skewed(tmp_path / "one")))
    folder = skewed(tmp_path / "two", ranks=[2, 2, 1, 1])
    write_loads(folder, np.tile(np.array([300, 300, 100, 100]) * 2, (20, 1, 1)), 4)
    two = outlook(read_run(folder))
    assert one is not None
    assert two is not None
    assert asdict(one) == pytest.approx(asdict(two))


@pytest.mark.parametrize(
    "choices",
    [
        {"placement": None},
        {"placement": {"row_forward": 1}},
        {"ranks": [1, 1, 1, 1]},
        {"ranks": "two"},
        {"hosts": [1]},
    ],
)
def test_without_costs_nothing_is_promised(tmp_path: Path, choices: dict[str, Any]) -> None:
    assert outlook(read_run(skewed(tmp_path / "run", **choices))) is None


def test_a_run_with_a_planner_is_not_told_to_use_one(tmp_path: Path) -> None:
    folder = skewed(tmp_path / "run")
    (folder / "config.toml").write_text('[placement]\nplanner = "greedy"\n')
    assert outlook(read_run(folder)) is None


def test_who_shares_experts_and_what_they_measured() -> None:
    assert sharers({"ranks": [2, 4, 2, 1]}, "whole") == 8
    assert sharers({"ranks": [2, 4, 2, 1]}, "sharded") == 4
    assert sharers({}, None) is None
    assert probe_of({"layers": {"0": {"probe": {"a": 1}}}, "placement": None}) == {"a": 1}
    assert probe_of({"layers": None}) is None


def test_uneven_ranks_cost_no_more_than_was_waited(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", straggle_ms=3.0))
    assert skew_ms(run) == pytest.approx(3.0), "rows above the mean would cost 8.5 ms"
