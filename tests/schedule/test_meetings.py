"""Ops that meet must name everyone they meet, and say the same thing in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import swapped, with_rank, without

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.meetings import check_launches, match
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import LayerShape, PipelineShape
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import expand, replicate


def test_an_unmatched_send_is_caught_by_the_matching_itself() -> None:
    """Where the set of ops cannot tell (here it is not asked), the communicator does."""
    lowered = lower(build("1f1b", 2, 3))
    ops = list(lowered.ranks[0])
    i = next(k for k, op in enumerate(ops) if op.kind is kinds.SEND_F and op.microbatch == 2)
    with pytest.raises(
        ScheduleError, match=r"1RECV_F2 on rank 1 meets nothing, because rank 0 launches only 2"
    ):
        match(with_rank(lowered, 0, without(ops, i)))


def test_reversing_two_collectives_on_one_rank_is_caught() -> None:
    program = smart(exchange_shape(4, group_size=2))
    ops = list(program.ranks[1])
    bad = with_rank(program, 1, swapped(ops, 0, 1))
    with pytest.raises(ScheduleError) as caught:
        verify(bad)
    message = str(caught.value)
    assert "S_F@0 on rank 0" in message
    assert "S_F@1" in message
    assert "rank 1" in message
    # Renumbering does not help: the members still say different things.
    renumbered = [op._replace(comm=("ep", k)) if k < 2 else op for k, op in enumerate(swapped(ops, 0, 1))]
    with pytest.raises(ScheduleError, match="same ops in the same order"):
        verify(with_rank(program, 1, renumbered))


def test_wrong_numbers_on_a_communicator_are_caught() -> None:
    program = smart(exchange_shape(3))
    ops = [op._replace(comm=("ep", 7)) if k == 1 else op for k, op in enumerate(program.ranks[2])]
    with pytest.raises(
        ScheduleError, match=r"op number 1 is S_F@1 on rank 0 but S_F@1 \(numbered 7\) on rank 2"
    ):
        verify(with_rank(program, 2, ops))
    alone = expand(build("pp1", 1, 2), [LayerShape()])
    ops = [op._replace(comm=("ep0", 9)) if op.kind is kinds.COMBINE_B else op for op in alone.ranks[0]]
    with pytest.raises(ScheduleError, match=r"of rank 0 is 0.0COMBINE_B0, numbered \('ep0', 9\)"):
        verify(with_rank(alone, 0, ops))


def test_groups_must_be_known() -> None:
    lowered = lower(build("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match=r"group '0>1' has no members listed"):
        verify(replace(lowered, groups={"1>0": (1, 0)}))
    with pytest.raises(ScheduleError, match=r"uses group '0>1', whose members are \[0, 5\]"):
        verify(replace(lowered, groups={**lowered.groups, "0>1": (0, 5)}))
    assert isinstance(lowered.shape, PipelineShape)


def test_one_sided_peers_are_refused() -> None:
    program = smart(exchange_shape(4))
    ops = list(program.ranks[2])
    ops[1] = ops[1]._replace(peers=())
    with pytest.raises(ScheduleError, match="S_F@1 on rank 2 exchanges with rank 0, but not the reverse"):
        verify(with_rank(program, 2, ops))


def test_a_send_in_the_wrong_direction_is_told() -> None:
    lowered = lower(build("1f1b", 2, 2))
    turned = replace(lowered, groups={**lowered.groups, "0>1": (1, 0)})
    with pytest.raises(ScheduleError, match=r"flows one way: 1RECV_F0 on rank 1 should be a SEND"):
        match(turned)


def changed(program: Program, rank: int, position: int, **fields: object) -> Program:
    ops = list(program.ranks[rank])
    ops[position] = ops[position]._replace(**fields)  # type: ignore[arg-type]
    return with_rank(program, rank, ops)


def test_what_communicates_names_a_group() -> None:
    """Without one nothing would hold it: a send might even stand at the end of its list."""
    lowered = lower(build("1f1b", 2, 2))
    send = next(i for i, op in enumerate(lowered.ranks[0]) if op.kind is kinds.SEND_F)
    with pytest.raises(ScheduleError, match="0SEND_F0 on rank 0 communicates, but names no group"):
        verify(changed(lowered, 0, send, comm=None))
    bare = [tuple(op._replace(comm=None) for op in ops) for ops in lowered.ranks]
    with pytest.raises(ScheduleError, match="names no group"):
        verify(replace(lowered, ranks=tuple(bare)))
    with pytest.raises(ScheduleError, match=r"0F0 on rank 0 computes.*and meets nobody"):
        verify(changed(lowered, 0, 0, comm=("0>1", 0)))


@pytest.mark.parametrize("lane", ["compute", "dp", "p2p:0>1"])
def test_a_lane_carries_its_own_kinds(lane: str) -> None:
    program = expand(build("pp1", 1, 2), [LayerShape()])
    at = next(i for i, op in enumerate(program.ranks[0]) if op.kind is kinds.COMBINE_F)
    with pytest.raises(ScheduleError, match=f"stands on lane '{lane}', which does not carry it"):
        check_launches(changed(program, 0, at, lane=lane))


def test_nobody_is_left_out() -> None:
    """Peers that shrink on all sides contradict nobody, and still leave rows behind."""
    program = smart(exchange_shape(4))
    alone = [
        tuple(op._replace(peers=(rank,)) if op.comm == ("ep", 1) else op for op in ops)
        for rank, ops in enumerate(program.ranks)
    ]
    with pytest.raises(
        ScheduleError, match=r"S_F@1 on rank 0 names peers \[0\], but exchanges with \[0, 1, 3\]"
    ):
        verify(replace(program, ranks=tuple(alone)))
    copies = replicate(expand(build("1f1b", 2, 2), [LayerShape()]), 2)
    at = next(i for i, op in enumerate(copies.ranks[0]) if op.kind is kinds.DISPATCH_F)
    with pytest.raises(ScheduleError, match=r"names peers \[0\], but exchanges with \[0, 1\]"):
        verify(changed(copies, 0, at, peers=(0,)))


def test_a_place_of_the_pipeline_meets_all_its_copies() -> None:
    copies = replicate(expand(build("1f1b", 2, 2), [LayerShape()]), 2)
    for members in ((0,), (0, 2), (0, 1, 2)):
        with pytest.raises(
            ScheduleError, match=r"uses group 'ep0', whose members are .*it goes among \[0, 1\]"
        ):
            check_launches(replace(copies, groups={**copies.groups, "ep0": members}))
    with pytest.raises(
        ScheduleError, match=r"uses group '0>2', whose members are \[0, 3\].*from and to \[0, 2\]"
    ):
        check_launches(replace(copies, groups={**copies.groups, "0>2": (0, 3)}))
