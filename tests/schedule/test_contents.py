"""The exact set of ops that a shape asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import with_rank, without

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.contents import check_contents
from moeclipse.schedule.kinds import Form, Kind
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import Op, forward
from moeclipse.schedule.shape import LayerShape, Shadow
from moeclipse.schedule.smart import backward_of, exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand


@pytest.mark.parametrize("kind", ["SEND_F", "SEND_B", "RECV_F", "RECV_B"])
def test_dropping_a_transfer_is_caught(kind: str) -> None:
    lowered = lower(build("dualpipev", 4, 8))
    for rank, ops in enumerate(lowered.ranks):
        positions = [i for i, op in enumerate(ops) if op.kind.name == kind]
        for i in positions[:: max(1, len(positions) // 3)]:
            bad = with_rank(lowered, rank, without(list(ops), i))
            with pytest.raises(ScheduleError, match=rf"rank {rank} lacks {ops[i]}"):
                verify(bad)


def test_exact_set_of_layer_ops() -> None:
    program = expand(build("1f1b", 2, 2), [LayerShape(recompute="full")], Expansion(chunks=2))
    verify(program)
    for kind in (kinds.MLP_F, kinds.ROUTE_W, kinds.DISPATCH_R, kinds.COMBINE_B, kinds.ATTN_B):
        ops = list(program.ranks[0])
        i = next(k for k, op in enumerate(ops) if op.kind is kind)
        with pytest.raises(ScheduleError, match=kind.name):
            verify(with_rank(program, 0, without(ops, i)))
    ops = list(program.ranks[0])
    with pytest.raises(ScheduleError, match="expected it once, or once for every chunk"):
        verify(with_rank(program, 0, [*ops, next(op for op in ops if op.kind is kinds.ATTN_W)]))


def test_what_belongs_elsewhere_is_told() -> None:
    program = lower(build("1f1b", 2, 2), reduce=True)
    check_contents(program)
    stray = Op(kind=kinds.SEND_F, stage=1, microbatch=0)
    with pytest.raises(ScheduleError, match=r"1SEND_F0 does not belong on rank 0, whose stages are \[0\]"):
        check_contents(with_rank(program, 0, [*program.ranks[0], stray]))
    shards = [Op(kind=kind, stage=0) for kind in (kinds.UNSHARD, kinds.RESHARD)]
    check_contents(with_rank(program, 0, [*program.ranks[0], *shards]))


@pytest.mark.parametrize("backward", [False, True])
def test_exact_set_of_an_exchange(backward: bool) -> None:
    shadow = Shadow(expert=0, owner=0, ranks=(1,))
    forward_shape = exchange_shape(3, chunks=2, shadows=[shadow])
    program = smart(backward_of(forward_shape) if backward else forward_shape)
    check_contents(program)
    for position, op in enumerate(program.ranks[1]):
        left = [other for other in program.ranks[1] if other is not op]
        with pytest.raises(ScheduleError, match=rf"rank 1 lacks {op}"):
            check_contents(with_rank(program, 1, left))
        with pytest.raises(ScheduleError, match=rf"rank 1 launches {op} twice"):
            check_contents(with_rank(program, 1, [*program.ranks[1], program.ranks[1][position]]))
    stray = Op(kind=kinds.S_F if backward else kinds.S_B, step=0)
    with pytest.raises(ScheduleError, match=rf"{stray} does not belong on rank 0"):
        check_contents(with_rank(program, 0, [*program.ranks[0], stray]))


def test_experts_of_an_exchange_are_counted_one_by_one() -> None:
    program = smart(exchange_shape(2, experts_per_rank=3, per_expert=True))
    check_contents(program)
    kept = [op for op in program.ranks[0] if not (op.kind is kinds.C_F and op.expert == 2)]
    with pytest.raises(ScheduleError, match=r"rank 0 lacks C_F@0~2"):
        check_contents(with_rank(program, 0, kept))


def test_a_microbatch_is_cut_into_one_number_of_chunks() -> None:
    """Forward in two and backward in three: a runtime would look for a third part of two."""
    program = build("1f1b", 1, 1)
    two, three = (expand(program, [LayerShape()], Expansion(chunks=n, split="layer")) for n in (2, 3))
    ops = [op for op in two.ranks[0] if op.kind.form is Form.F]
    ops += [op for op in three.ranks[0] if op.kind.form is not Form.F]
    with pytest.raises(ScheduleError, match=r"cuts microbatch 0 into 3 chunks, but 0.0ATTN_F0#0/2 into 2"):
        check_contents(with_rank(two, 0, ops))


@pytest.mark.parametrize("kind", [kinds.ATTN_F, kinds.ATTN_B, kinds.COMBINE_B, kinds.SHARED_B])
def test_chunks_enter_and_leave_a_stage_in_order(kind: Kind) -> None:
    program = expand(build("1f1b", 1, 1), [LayerShape()], Expansion(chunks=2, split="layer"))
    check_contents(program)
    ops = [op._replace(chunk=1 - (op.chunk or 0)) if op.kind is kind else op for op in program.ranks[0]]
    with pytest.raises(ScheduleError, match="chunks enter and leave a stage in order"):
        check_contents(with_rank(program, 0, ops))
    inside = [
        op._replace(chunk=1 - (op.chunk or 0)) if op.kind is kinds.MLP_F else op for op in program.ranks[0]
    ]
    check_contents(with_rank(program, 0, inside))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "it has no step and no expert"),
        ({"chunks": 2}, "says chunk None of 2"),
        ({"chunk": 0}, "only parts of layers are cut"),
        ({"parts": (forward(0, 0),)}, "a PAIR holds two"),
    ],
)
def test_an_op_says_nothing_that_its_kind_does_not_have(change: dict, message: str) -> None:
    program = lower(build("1f1b", 2, 2))
    ops = [program.ranks[0][0]._replace(**change), *program.ranks[0][1:]]
    with pytest.raises(ScheduleError, match=message):
        verify(with_rank(program, 0, ops))


def test_every_rank_has_a_list() -> None:
    for program in (build("1f1b", 3, 4), lower(build("1f1b", 3, 4)), smart(exchange_shape(3))):
        with pytest.raises(ScheduleError, match="has lists for 2 ranks"):
            verify(replace(program, ranks=program.ranks[:2]))
