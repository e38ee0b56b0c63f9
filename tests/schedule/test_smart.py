"""The exchange of one layer: any ranks, any groups, any order, shadows, both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Part
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import ExchangeShape, Shadow
from moeclipse.schedule.smart import backward_of, end_units, exchange_shape, natural_units, smart


@st.composite
def shapes(draw: st.DrawFn) -> ExchangeShape:
    P = draw(st.integers(1, 9))
    chunks = draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(P)))
    cuts = sorted(draw(st.sets(st.integers(1, P - 1), max_size=P - 1))) if P > 1 else []
    groups = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, P], strict=True)]
    units = draw(st.permutations(natural_units(len(groups), chunks, draw(st.integers(1, 4)))))
    experts = draw(st.integers(1, 3))
    shadows = []
    for expert in draw(st.sets(st.integers(0, P * experts - 1), max_size=4)):
        owner = expert // experts
        holders = draw(st.sets(st.sampled_from([r for r in range(P) if r != owner]))) if P > 1 else set()
        shadows.append(Shadow(expert=expert, owner=owner, ranks=tuple(sorted(holders))))
    return exchange_shape(
        P,
        groups=groups,
        chunks=chunks,
        units=units,
        experts_per_rank=experts,
        per_expert=draw(st.booleans()),
        shadows=shadows,
        serving=draw(st.booleans()),
        backward=draw(st.booleans()),
        blocking=draw(st.booleans()),
    )


@settings(max_examples=80, deadline=None)
@given(shapes())
def test_every_shape_verifies(shape: ExchangeShape) -> None:
    verify(smart(shape))
    verify(smart(backward_of(shape)))
    verify(smart(backward_of(shape, own_weights=0)))


@pytest.mark.parametrize("backward", [False, True])
def test_every_group_size_verifies_ragged_ones_too(backward: bool) -> None:
    for P in range(1, 13):
        for size in range(1, P + 2):
            verify(smart(exchange_shape(P, group_size=size, chunks=2, backward=backward)))


@pytest.mark.parametrize("backward", [False, True])
def test_sixty_four_ranks_in_groups_of_eight(backward: bool) -> None:
    shape = exchange_shape(64, group_size=8, chunks=2, backward=backward)
    program = smart(shape)
    verify(program)
    assert shape.num_steps == 8
    assert all(sum(op.kind.part is Part.S for op in ops) == 16 for ops in program.ranks)


def test_launch_order_is_that_of_the_docstring() -> None:
    shape = exchange_shape(3, shadows=[Shadow(expert=2, owner=2, ranks=(0,))])
    assert launches(smart(shape), 0) == (
        "S_F@0 S_F@1 S_F@2 SHADOW_SEND C_F@0 R_F@0 C_F@1 R_F@1 C_F@2 R_F@2 SHADOW_F"
    )
    backward = exchange_shape(3, shadows=[Shadow(expert=2, owner=2, ranks=(0,))], backward=True)
    program = smart(backward)
    assert launches(program, 0) == (
        "S_B@0 S_B@1 S_B@2 SHADOW_B SHADOW_W SHADOW_REDUCE C_B@0 R_B@0 C_B@1 R_B@1 C_B@2 R_B@2 C_W SHADOW_ADD"
    )
    assert launches(program, 1) == launches(program, 0), "every rank takes part, borrower or not"


def test_shadows_that_serve_others_come_before_all_rows_and_go_back_behind_all_gradients() -> None:
    shape = exchange_shape(2, shadows=[Shadow(expert=2, owner=1, ranks=(0,))], serving=True)
    assert launches(smart(shape), 0) == "SHADOW_SEND S_F@0 S_F@1 C_F@0 R_F@0 C_F@1 R_F@1"
    back = smart(backward_of(shape))
    assert launches(back, 0) == "S_B@0 S_B@1 C_B@0 R_B@0 C_W@0 C_B@1 R_B@1 C_W SHADOW_REDUCE SHADOW_ADD"
    late = replace(smart(shape), ranks=tuple(without_dep(ops) for ops in smart(shape).ranks))
    with pytest.raises(ScheduleError, match="SHADOW_SEND"):
        verify(late)
    assert not exchange_shape(2, serving=True).serving, "nobody serves without shadows"


def without_dep(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Rows that do not wait for what is lent."""
    return tuple(op._replace(deps=op.deps[:1]) if op.kind is kinds.C_F else op for op in ops)


def launches(program: Program, rank: int) -> str:
    return " ".join(map(str, program.ranks[rank]))


def test_own_rows_stand_at_both_ends() -> None:
    assert end_units(3) == ((0, 0), (1, 0), (2, 0), (0, 1)), "own rows alone are halved"
    assert end_units(2, 3) == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2))
    program = smart(exchange_shape(3, units=end_units(3)))
    assert launches(program, 1) == (
        "S_F@0#0/2 S_F@1 S_F@2 S_F@0#1/2 C_F@0#0/2 R_F@0#0/2 C_F@1 R_F@1 C_F@2 R_F@2 C_F@0#1/2 R_F@0#1/2"
    )
    verify(program)


def test_own_rows_give_their_weight_gradients_before_others_are_needed() -> None:
    whole = smart(backward_of(exchange_shape(3, units=end_units(3))))
    assert launches(whole, 0).endswith(
        "C_B@0#0/2 R_B@0#0/2 C_B@0#1/2 R_B@0#1/2 C_W@0 C_B@1 R_B@1 C_B@2 R_B@2 C_W"
    )
    cut = smart(backward_of(exchange_shape(2, chunks=2)))
    assert launches(cut, 0).endswith(
        "C_B@0#0/2 R_B@0#0/2 C_B@0#1/2 R_B@0#1/2 C_B@1#0/2 R_B@1#0/2 C_W@0 C_B@1#1/2 R_B@1#1/2 C_W"
    )
    one_group = smart(backward_of(exchange_shape(3, group_size=3)))
    assert launches(one_group, 0) == "S_B@0 C_B@0 R_B@0 C_W", "nothing comes from elsewhere"
    too_early = backward_of(exchange_shape(3, units=end_units(3)), own_weights=1)
    with pytest.raises(ScheduleError):
        verify(smart(too_early))


def test_return_waits_for_its_own_compute_alone() -> None:
    for ops in smart(exchange_shape(4, chunks=2)).ranks:
        for op in ops:
            if op.kind is kinds.R_F:
                (dep,) = op.deps
                assert (ops[dep].kind, ops[dep].step, ops[dep].chunk) == (kinds.C_F, op.step, op.chunk)


def test_blocking_order_waits_for_everything() -> None:
    ops = smart(exchange_shape(4, blocking=True)).ranks[0]
    computes = [i for i, op in enumerate(ops) if op.kind is kinds.C_F]
    assert all(set(ops[i].deps) == {0, 1, 2, 3} for i in computes)
    assert all(set(op.deps) == set(computes) for op in ops if op.kind is kinds.R_F)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": [[0, 1], [1, 2, 3]]}, "each of the ranks 0..3 once"),
        ({"units": [(0, 0), (1, 0)]}, "each of the 4 steps x 1 chunks once"),
        ({"chunks": 0}, "must be at least 1"),
        ({"group_size": 0}, "must be at least 1"),
        ({"shadows": [Shadow(expert=0, owner=0, ranks=(0, 1))]}, "the owner not among the others"),
        ({"shadows": [Shadow(expert=0, owner=0, ranks=(9,))]}, "distinct ranks below 4"),
        (
            {"shadows": [Shadow(expert=0, owner=0, ranks=(1,)), Shadow(expert=0, owner=0, ranks=(2,))]},
            "shadowed once",
        ),
    ],
)
def test_bad_shapes_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        exchange_shape(4, **change)
