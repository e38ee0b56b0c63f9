"""Ops and programs: values with a text form."""

from __future__ import annotations

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import (
    Op,
    backward,
    forward,
    input_grad,
    overlap_alone,
    pair,
    self_overlap,
    weight_grad,
)
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import expand


def test_ops_are_values() -> None:
    assert Op(kind=kinds.F, stage=1, microbatch=0) == Op(kind=kinds.F, stage=1, microbatch=0)
    assert len({Op(kind=kinds.F, stage=1, microbatch=0), Op(kind=kinds.F, stage=1, microbatch=0)}) == 1


def test_the_text_of_an_op() -> None:
    assert str(forward(2, 0)) == "2F0"
    assert str(pair(forward(0, 7), backward(7, 3))) == "(0F7;7B3)"
    assert str(self_overlap(input_grad(2, 0))) == "(2I0)"
    layer = Op(kind=kinds.DISPATCH_F, stage=2, layer=1, microbatch=0, chunk=0, chunks=2)
    assert str(layer) == "2.1DISPATCH_F0#0/2"
    assert str(Op(kind=kinds.S_F, step=3, chunk=1, chunks=2, expert=0)) == "S_F@3#1/2~0"
    assert str(Op(kind=kinds.C_W)) == "C_W"


def test_actions_hold_activations_from_forward_to_their_last_use() -> None:
    """F keeps one unit; whoever needs it last gives it back."""
    made = (forward(0, 0), backward(0, 0), input_grad(0, 0), weight_grad(0, 0))
    assert [(op.alloc, op.free) for op in made] == [(1, 0), (0, 1), (0, 0), (0, 1)]
    both = pair(forward(0, 1), backward(0, 0))
    assert (both.alloc, both.free) == (1, 1)
    assert both.leaves == both.parts == (forward(0, 1), backward(0, 0))
    alone = self_overlap(forward(0, 0))
    assert (alone.alloc, alone.free, alone.leaves) == (1, 0, (forward(0, 0),))
    assert forward(0, 0).leaves == (forward(0, 0),)


def test_a_program_knows_its_level() -> None:
    actions = build("1f1b", 2, 3)
    assert (actions.num_ranks, actions.num_ops) == (2, 12)
    assert not actions.explicit
    exchange = smart(exchange_shape(3))
    assert lower(actions).explicit
    assert expand(actions, [LayerShape()]).explicit
    assert exchange.explicit
    assert actions.pipeline() is actions.shape
    assert exchange.exchange() is exchange.shape
    with pytest.raises(ScheduleError, match="smart forward is the exchange of one layer; a pipeline program"):
        exchange.pipeline()
    with pytest.raises(ScheduleError, match="1f1b is a pipeline program; the exchange of one layer"):
        actions.exchange()


def test_whatever_is_alone_overlaps_itself() -> None:
    program = overlap_alone(build("dualpipev", 2, 4))
    assert program.name == "dualpipev+self"
    for before, after in zip(build("dualpipev", 2, 4).ranks, program.ranks, strict=True):
        for plain, op in zip(before, after, strict=True):
            stays = plain.kind in (kinds.PAIR, kinds.W)
            assert op == (plain if stays else self_overlap(plain))
    verify(program)
