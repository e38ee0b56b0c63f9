"""What is printed can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.legal import SCHEDULES, broken_rules, default_stages_per_rank
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import overlap_alone
from moeclipse.schedule.shape import LayerShape, Shadow
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.schedule.text import format_program, parse_op, parse_program


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


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_programs_round_trip(name: str, P: int, M: int, layered: bool) -> None:
    V = default_stages_per_rank(name)
    if broken_rules(name, P, M, V):
        return
    program = build(name, P, M, V)
    layers = [LayerShape(), LayerShape(moe=False, recompute="attn")]
    for form in (program, overlap_alone(program), lower(program, reduce=True)):
        assert parse_program(format_program(form)) == form
    if layered:
        expanded = expand(program, layers, Expansion(chunks=3))
        assert parse_program(format_program(expanded)) == expanded


def test_an_exchange_round_trips_and_still_verifies() -> None:
    shadow = Shadow(expert=1, owner=1, ranks=(0, 4))
    program = smart(exchange_shape(5, group_size=2, chunks=2, backward=True, shadows=[shadow]))
    again = parse_program(format_program(program))
    assert again == program
    verify(again)


def test_bad_text_names_the_line() -> None:
    text = format_program(lower(build("1f1b", 2, 2)))
    lines = text.splitlines()
    bad = next(i for i, line in enumerate(lines) if "SEND_F" in line)
    with pytest.raises(ScheduleError, match=rf"line {bad + 1} .*unknown word 'colour=blue'"):
        parse_program("\n".join([*lines[:bad], lines[bad] + " colour=blue", *lines[bad + 1 :]]))
    with pytest.raises(ScheduleError, match="no line `pipeline"):
        parse_program("rank 0\n0F0\n")
    with pytest.raises(ScheduleError, match=r"line 3 .*rank 1 follows rank -1"):
        parse_program("\n".join([*lines[:2], "rank 1"]))
