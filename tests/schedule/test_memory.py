"""What ops hold: the table, and that the verifier demands it of every op."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import with_rank

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.memory import event_memory, layer_memory, memory_columns, memory_of
from moeclipse.schedule.op import Op, Program, backward, forward, pair, self_overlap
from moeclipse.schedule.shape import Activation, LayerShape, PipelineShape, StagePlacement
from moeclipse.schedule.smart import backward_of, exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand


def test_actions_take_one_unit_and_give_it_back() -> None:
    shape = PipelineShape(placement=StagePlacement.loop(1), num_microbatches=2, unit=0.5)
    assert memory_of(shape, forward(0, 0)) == (0.5, 0.0)
    assert memory_of(shape, backward(0, 0)) == (0.0, 0.5)
    assert memory_of(shape, Op(kind=kinds.I, stage=0, microbatch=0)) == (0.0, 0.0)
    assert memory_of(shape, pair(forward(0, 1), backward(0, 0))) == (0.5, 0.5)
    assert memory_of(shape, self_overlap(backward(0, 0))) == (0.0, 0.5)


def test_a_layer_keeps_until_dw_what_recompute_does_not_bring_back() -> None:
    size = Activation(input=1.0, attn=2.0, shared=4.0, mlp=8.0, head=16.0)
    kept = LayerShape(activation=size, head=True)
    assert layer_memory(kept, kinds.ATTN_F) == (3.0, 0.0)
    assert layer_memory(kept, kinds.ATTN_W) == (0.0, 3.0)
    assert layer_memory(kept, kinds.MLP_F) == (8.0, 0.0)
    assert layer_memory(kept, kinds.MLP_B) == (0.0, 0.0)
    assert layer_memory(kept, kinds.HEAD_W) == (0.0, 16.0)
    again = replace(kept, recompute="full")
    assert layer_memory(again, kinds.ATTN_F) == (1.0, 0.0)
    assert layer_memory(again, kinds.ATTN_R) == (2.0, 0.0)
    assert layer_memory(replace(kept, moe=False), kinds.MLP_F) == (12.0, 0.0)


def test_dx_takes_gradients_for_dw_and_releases_what_it_alone_needed() -> None:
    size = Activation(attn=4.0, attn_grad=-1.5, mlp=8.0, mlp_grad=3.0)
    layer = LayerShape(activation=size)
    assert layer_memory(layer, kinds.ATTN_B) == (0.0, 1.5)
    assert layer_memory(layer, kinds.ATTN_W) == (0.0, pytest.approx(0.1 + 4.0 - 1.5))
    assert layer_memory(layer, kinds.MLP_B) == (3.0, 0.0)
    assert layer_memory(layer, kinds.MLP_W) == (0.0, 11.0)
    program = verify(expand(build("zb-h1", 2, 4), [layer], Expansion(chunks=2)))
    for ops in program.program.ranks:
        assert sum(op.alloc - op.free for op in ops) == pytest.approx(0.0)
    plain = verify(expand(build("zb-h1", 2, 4), [replace(layer, activation=replace(size, mlp_grad=0.0))]))
    assert program.peak[0] > plain.peak[0]


def test_an_exchange_keeps_its_rows_until_they_have_gone_back() -> None:
    shape = exchange_shape(3, chunks=2, experts_per_rank=2, per_expert=True)
    assert event_memory(shape, kinds.S_F) == (1 / 12, 0.0)
    assert event_memory(shape, kinds.R_F) == (0.0, 0.0)
    assert event_memory(backward_of(shape), kinds.R_B) == (0.0, 1 / 12)


PROGRAMS: dict[str, Program] = {
    "actions": build("zb-v", 2, 4),
    "lists": lower(build("1f1b-pairs", 2, 4)),
    "layers": expand(build("dualpipev", 2, 4), [LayerShape(recompute="mlp")], Expansion(chunks=2)),
    "exchange": smart(exchange_shape(3)),
    "back": smart(backward_of(exchange_shape(3))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_op_says_what_it_holds(name: str) -> None:
    program = PROGRAMS[name]
    verify(program)
    for position, op in enumerate(program.ranks[0]):
        for field in ("alloc", "free"):
            for wrong in (getattr(op, field) + 0.01, float("nan")):
                ops = list(program.ranks[0])
                ops[position] = op._replace(**{field: wrong})
                with pytest.raises(ScheduleError, match=r"on rank 0 says that it takes .*, but it takes"):
                    verify(with_rank(program, 0, ops))


def test_columns_of_a_rank_are_what_its_ops_say() -> None:
    program = build("1f1b", 3, 4)
    for rank, ops in enumerate(program.ranks):
        taken, given = memory_columns(program, rank)
        assert taken.tolist() == [op.alloc for op in ops]
        assert given.tolist() == [op.free for op in ops]
