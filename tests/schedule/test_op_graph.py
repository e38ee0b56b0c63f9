"""Ops that meet must say the same thing in the same order; and the graph that follows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from edits import swapped, with_rank, without

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op_graph import match, op_graph
from moeclipse.schedule.shape import LayerShape, PipelineShape
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand, replicate


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


def test_reversed_exchanges_of_a_pipeline_are_caught() -> None:
    program = replicate(expand(build("vpp+1", 2, 4), [LayerShape()] * 2, Expansion()), 2)
    verify(program)
    ops = list(program.ranks[1])
    a2a = [i for i, op in enumerate(ops) if op.lane == "a2a"]
    bad = with_rank(program, 1, swapped(ops, a2a[4], a2a[5]))
    with pytest.raises(ScheduleError, match=r"same ops in the same order|not launched before"):
        verify(bad)


def test_a_receive_in_front_of_a_send_on_one_lane_deadlocks() -> None:
    """Two directions on one communicator: each side waits in its receive for the other's send."""
    good = lower(build("1f1b", 2, 1))
    verify(good)
    shared = [tuple(op._replace(lane="p2p:both") if op.comm else op for op in ops) for ops in good.ranks]
    ops = list(shared[0])
    send = next(i for i, op in enumerate(ops) if op.kind is kinds.SEND_F)
    receive = next(i for i, op in enumerate(ops) if op.kind is kinds.RECV_B)
    if send < receive:
        ops = swapped(ops, send, receive)
    with pytest.raises(ScheduleError, match="0SEND_F0 on rank 0 waits on its lane for 0RECV_B0"):
        verify(replace(good, ranks=(tuple(ops), shared[1])))
    # With a lane per direction the same launch order runs.
    order = [op._replace(lane=f"p2p:{op.comm[0]}") if op.comm else op for op in ops]
    verify(replace(good, ranks=(tuple(order), good.ranks[1])))


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
    ops[1] = ops[1]._replace(peers=(1, 2))
    with pytest.raises(ScheduleError, match="exchanges with rank 2, but not the reverse"):
        verify(with_rank(program, 2, ops))


def test_a_send_in_the_wrong_direction_is_told() -> None:
    lowered = lower(build("1f1b", 2, 2))
    turned = replace(lowered, groups={**lowered.groups, "0>1": (1, 0)})
    with pytest.raises(ScheduleError, match=r"flows one way: 1RECV_F0 on rank 1 should be a SEND"):
        match(turned)


def test_what_meets_is_one_vertex() -> None:
    program = lower(build("1f1b", 2, 1))
    graph = op_graph(program)
    ops = [str(op) for ops in program.ranks for op in ops]
    assert graph.members is not None
    together = [sorted(ops[node] for node in nodes) for nodes in graph.members if len(nodes) > 1]
    assert sorted(together) == [["0RECV_B0", "1SEND_B0"], ["0SEND_F0", "1RECV_F0"]]
    order = [ops[node] for v in graph.order for node in graph.members[v] if node < len(ops)]
    for before, after in pairwise(["0F0", "1RECV_F0", "1F0", "1B0", "0RECV_B0", "0B0"]):
        assert order.index(before) < order.index(after)


def test_a_host_that_waits_for_another_lane_is_a_node_of_its_own() -> None:
    """A send of what another communication lane brings: on a host that computes inline it waits there."""
    program = expand(build("1f1b", 2, 1), [LayerShape(shared=False)], Expansion())
    graph = op_graph(program)
    foreign = sum(
        any(ops[d].comm and ops[d].lane != op.lane for d in op.deps)
        for ops in program.ranks
        for op in ops
        if op.comm
    )
    assert foreign > 0
    assert graph.num_nodes == graph.num_ops + foreign
