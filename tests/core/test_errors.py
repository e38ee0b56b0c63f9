"""Errors that we raise on purpose: how they read, and what ends a command with which status."""

from __future__ import annotations

import pytest

from moeclipse.core import errors
from moeclipse.core.errors import ConfigError, MoEclipseError

KINDS: dict[str, tuple[int, type[Exception]]] = {
    "ConfigError": (2, ValueError),
    "ScheduleError": (2, ValueError),
    "DataError": (2, ValueError),
    "CheckpointError": (2, MoEclipseError),
    "StorageError": (1, errors.CheckpointError),
    "CommError": (1, RuntimeError),
    "DeadlineError": (1, errors.CommError),
    "DivergedError": (1, RuntimeError),
    "CorruptionError": (1, RuntimeError),
    "Preempted": (75, MoEclipseError),
}


def test_one_problem_reads_as_it_is_and_several_as_a_list() -> None:
    one = ConfigError("gate.top_k (9) must be at most 8")
    assert str(one) == "gate.top_k (9) must be at most 8"
    assert one.problems == [str(one)]
    two = ConfigError(("first", "second"))
    assert str(two) == "2 problems:\n  - first\n  - second"
    assert two.problems == ["first", "second"]


@pytest.mark.parametrize("name", KINDS)
def test_bad_input_ends_with_2_and_all_else_with_1(name: str) -> None:
    """Who starts ranks again looks at the status: bad input would only fail again."""
    code, base = KINDS[name]
    error = getattr(errors, name)("why")
    assert isinstance(error, MoEclipseError)
    assert isinstance(error, base)
    assert (error.code, str(error)) == (code, "why")


def test_no_error_is_left_out() -> None:
    defined = {kind.__name__ for kind in vars(errors).values() if getattr(kind, "code", None)}
    assert defined == {"MoEclipseError", *KINDS}
