"""Conditions: what they say, what they refuse, and that nothing but numbers is ever evaluated."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.core.errors import ConfigError
from moeclipse.report.fail_if import judge

FIRST = {"exposed": 0.12, "tokens_per_s": 900.0, "loss": 2.5, "skipped": 0.0, "mfu": None}
SECOND = {"exposed": 0.10, "tokens_per_s": 1000.0, "loss": 2.4, "skipped": 0.0, "mfu": 0.5}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("exposed > 10%", True),
        ("exposed>0.12", False),
        ("exposed >= 12 %".replace(" %", "%"), True),
        ("tokens_per_s < 0.95 * RUN2", True),
        ("tokens_per_s < 0.85*RUN2", False),
        ("loss > RUN2.loss + 0.05", True),
        ("loss - RUN2 > 0.2", False),
        ("RUN2 < loss", True),
        ("exposed > 50% or loss > 2", True),
        ("exposed > 50% and loss > 2", False),
        ("not (exposed > 50% or loss > 3)", True),
        ("(loss + 1) * 2 == 7", True),
        ("((loss)) != 2.5", False),
        ("-loss < -2 and 1 - 2 - 3 == -4 and 8 / 2 / 2 == 2", True),
        ("1 + 2 * 3 == 7", True),
        ("loss > 2 or exposed > 1 and loss < 0", True),
        ("1e3 >= tokens_per_s", True),
    ],
)
def test_conditions_hold_or_not(text: str, holds: bool) -> None:
    assert judge(text, FIRST, SECOND).holds is holds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exposd > 10%", "did you mean exposed?"),
        ("tokens_per_sec > 1", "did you mean tokens_per_s?"),
        ("mfu < 0.4", "the run has no mfu"),
        ("exposed", "compares nothing"),
        ("exposed > ", "number is missing"),
        ("exposed > > 1", "'>' stands where"),
        ("(exposed > 1", "bracket is not closed"),
        ("exposed > 1 2", "one word too many"),
        ("1 < 2 < 3", "one word too many"),
        ("exposed > 1; import os", "cannot read ';"),
        ("__import__('os') > 1", "cannot read"),
        ("loss / 0 > 1", "divides by 0"),
        ("", "is empty"),
        ("1 < RUN2", "which number of RUN2"),
        ("loss > RUN2.lss", "did you mean loss?"),
        ("(" * 300, "at most"),
    ],
)
def test_mistakes_are_told(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judge(text, FIRST, SECOND)
    assert why in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_no_number_is_not_compared(value: float | None) -> None:
    with pytest.raises(ConfigError, match="the run has no loss"):
        judge("loss > 100", FIRST | {"loss": value})
    with pytest.raises(ConfigError, match="the second run has no loss"):
        judge("loss > RUN2", FIRST, SECOND | {"loss": value})


def test_a_third_run_has_a_number_too() -> None:
    third = SECOND | {"loss": 9.0}
    told = judge("loss < RUN3 and RUN3.loss > RUN2.loss", FIRST, SECOND, third)
    assert told.holds
    assert "RUN3.loss is 9" in told.told
    with pytest.raises(ConfigError, match="RUN4 is not given"):
        judge("loss < RUN4", FIRST, SECOND, third)


def test_a_second_run_must_be_there() -> None:
    with pytest.raises(ConfigError, match="RUN2 is not given"):
        judge("loss > RUN2", FIRST)


def test_both_sides_of_an_or_are_read() -> None:
    """A mistake behind a condition that already holds is a mistake all the same."""
    with pytest.raises(ConfigError, match="no lss"):
        judge("loss > 1 or lss > 2", FIRST)


def test_what_was_compared_is_told() -> None:
    told = judge("tokens_per_s < 0.95 * RUN2", FIRST, SECOND).told
    assert told == "tokens_per_s < 0.95 * RUN2: tokens_per_s is 900, RUN2.tokens_per_s is 1,000"


@given(
    st.lists(
        st.sampled_from(["loss", "exposed", "RUN2", "1", "2%", "<", "==", "+", "-", "(", ")", "not", "and"])
    )
)
def test_any_words_hold_or_are_refused(words: list[str]) -> None:
    with suppress(ConfigError):
        assert judge(" ".join(words), FIRST, SECOND).holds in (True, False)
