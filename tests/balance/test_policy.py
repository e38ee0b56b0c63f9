"""A function of the user's own is found by its name, and what is wrong with the name is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plans import asked

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.placement import Placement
from moeclipse.balance.policy import load_policy, policy_problems
from moeclipse.core.errors import ConfigError


def stay(problem: object) -> object:
    """A policy that this very module offers."""
    return problem


def test_a_policy_is_found_in_a_file_and_in_a_module(tmp_path: Path) -> None:
    file = tmp_path / "plans_of_mine.py"
    file.write_text("def turned(problem):\n    return type(problem.current)(problem.current.slots[::-1])\n")
    policy = load_policy(f"{file}:turned")
    problem = asked(np.ones((2, 4)), (2, 2), Placement.contiguous(4, 2))
    assert policy(problem).slots == ((2, 3), (0, 1))
    found = load_policy("test_policy:stay")
    assert found(problem) is problem  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("turned", "must be FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("plans.py:", "must be FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("no/such.py:turned", "there is no file no/such.py"),
        ("test_policy:missing", "test_policy has no function missing"),
        ("no_such_module_anywhere:f", "no_such_module_anywhere cannot be loaded"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(text)


def test_a_policy_stands_in_place_of_a_planner(tmp_path: Path) -> None:
    assert [*policy_problems("plans:f", "static")] == [*policy_problems("plans:f", "auto")] == []
    config = PlacementConfig(policy="plans:f")
    assert all((config.moves, config.in_use, config.used_by(1)))
    (problem,) = PlacementConfig(policy="plans:f", planner="exact").problems()
    assert "leave out placement.planner ('exact')" in problem
