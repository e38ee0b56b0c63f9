"""Lowering: sends right behind what they carry, receives ahead and in the order of the sends."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Form, Part
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import backward, forward, pipeline_program
from moeclipse.schedule.shape import LayerShape, StagePlacement
from moeclipse.schedule.templates import Expansion, expand


def test_a_small_pipeline_by_hand() -> None:
    program = lower(build("1f1b", 2, 2))
    assert [" ".join(map(str, ops)) for ops in program.ranks] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    first = program.ranks[0]
    assert first[1].comm == ("0>1", 0)
    assert first[1].lane == "p2p:0>1"
    assert first[1].deps == (0,)
    assert [first[d].kind for d in first[6].deps] == [kinds.RECV_B]
    assert program.groups == {"0>1": (0, 1), "1>0": (1, 0)}


@pytest.mark.parametrize(
    ("name", "P", "M"), [("zb-v", 4, 9), ("dualpipe", 4, 8), ("vpp+1", 3, 6), ("dualpipev", 3, 7)]
)
def test_receives_follow_the_order_of_sends(name: str, P: int, M: int) -> None:
    program = lower(build(name, P, M))
    placement = program.pipeline().placement
    for group, (source, target) in program.groups.items():
        sent = [op for op in program.ranks[source] if op.comm and op.comm[0] == group]
        received = [op for op in program.ranks[target] if op.comm and op.comm[0] == group]
        assert [op.comm for op in sent] == [(group, k) for k in range(len(sent))]
        assert [op.comm for op in received] == [op.comm for op in sent]
        for out, back in zip(sent, received, strict=True):
            assert out.kind.form is back.kind.form
            assert out.microbatch == back.microbatch
            step = 1 if out.kind is kinds.SEND_F else -1
            assert back.stage == out.stage + step
            assert placement.rank_of[back.stage] == target


def test_receives_are_posted_one_action_ahead() -> None:
    ops = lower(build("1f1b", 4, 6)).ranks[2]
    for i, op in enumerate(ops):
        if op.kind.part is Part.RECV:
            reader = next(j for j, other in enumerate(ops) if i in other.deps)
            between = [other for other in ops[i + 1 : reader] if other.comm is None]
            assert len(between) >= (1 if i > 1 else 0)


def test_sends_leave_before_the_weight_gradients_of_their_action() -> None:
    program = expand(build("1f1b", 2, 2), [LayerShape()] * 2, Expansion())
    ops = [str(op) for op in program.ranks[1]]
    assert ops.index("1SEND_B0") < ops.index("1.0ATTN_W0")
    assert ops.index("1SEND_B0") == ops.index("1.0ATTN_B0") + 1


def test_one_reduction_per_stage_behind_its_last_weight_gradient() -> None:
    for program in (
        lower(build("zb-v", 2, 4), reduce=True),
        expand(build("zb-v", 2, 4), [LayerShape(), LayerShape(moe=False)], reduce=True),
    ):
        verify(program)
        for rank, ops in enumerate(program.ranks):
            reductions = [i for i, op in enumerate(ops) if op.kind is kinds.REDUCE]
            assert sorted(ops[i].stage for i in reductions) == list(
                program.pipeline().placement.stages_of(rank)
            )
            for i in reductions:
                later = [o for o in ops[i + 1 :] if o.stage == ops[i].stage and o.kind.form is Form.W]
                assert not later
                assert ops[i].lane == "dp"
                assert ops[i].deps


def test_lowering_twice_or_sending_to_nobody_is_refused() -> None:
    with pytest.raises(ScheduleError, match="lowered already"):
        lower(lower(build("1f1b", 2, 2)))
    half = pipeline_program("half", [[forward(0, 0), backward(0, 0)], []], StagePlacement.loop(2), 1)
    with pytest.raises(ScheduleError, match="rank 0 sends F0 to stage 1, which rank 1 never reads"):
        lower(half)


def test_one_rank_needs_no_transfers() -> None:
    program = lower(build("pp1", 1, 4))
    assert program.explicit
    assert [str(op) for op in program.ranks[0]] == [str(op) for op in build("pp1", 1, 4).ranks[0]]
    verify(program)
