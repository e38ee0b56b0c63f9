"""A function of the user's own is found by its name, and what is wrong with the name is said."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from plans import asked

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.placement import Placement
from moeclipse.balance.policy import guarded, load_policy, policy_problems
from moeclipse.core.errors import ConfigError
from moeclipse.train.placement.background_plan import PlanThread


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


LEAVING = """
import sys

class Own(BaseException): ...

def leaves(problem): sys.exit(3)
def raises(problem): raise Own("mine")
def interrupts(problem): raise KeyboardInterrupt
def deepens(problem): return deepens(problem)
def forgets(problem): return problem["loads"]
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("leaves", r"SystemExit\(3\)"),
        ("raises", r"Own\('mine'\)"),
        ("interrupts", r"KeyboardInterrupt\(\)"),
        ("deepens", "RecursionError"),
        ("forgets", "TypeError"),
    ],
)
def test_whatever_a_policy_raises_is_an_answer_with_its_name(name: str, told: str, tmp_path: Path) -> None:
    """In the thread that plans; a thread that ended without an answer ended the run."""
    file, thread = tmp_path / "mine.py", PlanThread()
    file.write_text(LEAVING)
    policy, problem = (
        load_policy(f"{file}:{name}"),
        asked(np.ones((2, 4)), (2, 2), Placement.contiguous(4, 2)),
    )
    thread.start(lambda: str(policy(problem)))
    found = thread.take()
    assert isinstance(found, ConfigError)
    assert re.search(rf"placement\.policy \S+mine.py:{name} raised {told}", str(found))


def test_a_person_can_interrupt_a_policy() -> None:
    def waits(_: object) -> Placement:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(waits, "mine:waits")(asked(np.ones((2, 4)), (2, 2), Placement.contiguous(4, 2)))


def test_a_file_that_leaves_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\nsys.exit('usage: script.py RUN')\ndef f(problem): ...\n")
    with pytest.raises(
        ConfigError, match=r"script.py cannot be loaded \(SystemExit\('usage: script.py RUN'\)\)"
    ):
        load_policy(f"{file}:f")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def other(problem): ...\n", "mine.py has no function f"),
        ("import sys\nsys.exit()\n", "mine.py has no function f"),
        ("def f(problem)\n", "mine.py cannot be loaded (SyntaxError"),
        ("def f(problem): ...\n", ""),
        ("from elsewhere import f\n", ""),
        ("from elsewhere import *\n", ""),
        ("f = lambda problem: problem.start\n", ""),
        ("try:\n    from fast import f\nexcept ImportError:\n    def f(problem): ...\n", ""),
    ],
)
def test_a_file_is_looked_into_before_ranks_start(text: str, told: str, tmp_path: Path) -> None:
    """Without running it."""
    file = tmp_path / "mine.py"
    file.write_text(text)
    problems = [*PlacementConfig(policy=f"{file}:f").problems()]
    assert len(problems) == bool(told)
    assert all(told in problem for problem in problems)
