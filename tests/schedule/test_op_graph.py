"""The graph of lists: lanes, hosts and communicators hold back what is launched behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from edits import swapped, with_rank
from oracle import why_broken

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.legal import SCHEDULES
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import Program
from moeclipse.schedule.op_graph import op_graph
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand, replicate


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


def test_a_host_that_waits_for_a_transfer_is_a_node_of_its_own() -> None:
    """A send of what another transfer brings: on a host that computes inline it waits there."""
    program = expand(build("1f1b", 2, 1), [LayerShape(shared=False)], Expansion())
    graph = op_graph(program)
    waits = sum(any(ops[d].comm for d in op.deps) for ops in program.ranks for op in ops if op.comm)
    assert waits > 0
    assert graph.num_nodes == graph.num_ops + waits


def per_pair(program: Program) -> Program:
    """As torch's NCCL has it where nothing else is said: both ways between two ranks on one communicator."""
    pairs = {group: "-".join(sorted(group.split(">"))) for group in program.groups if ">" in group}
    return replace(program, communicators=pairs)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("pp1", "layers")])
def test_one_communicator_for_both_ways_is_refused_exactly_where_it_hangs(name: str) -> None:
    """A receive that is posted ahead holds the communicator, and the send behind it never leaves."""
    program = expand(build(name, 2, 4), [LayerShape()], Expansion())
    verify(program)
    shared = per_pair(program)
    why = why_broken(shared)
    assert why is not None
    assert "streams: " in why
    with pytest.raises(ScheduleError, match="waits on the same wire for"):
        verify(shared)


def test_ranks_that_take_turns_may_share_a_communicator() -> None:
    """One microbatch: rank 0 posts its receive behind its send, as rank 1 meets them."""
    program = lower(build("gpipe", 2, 1))
    ops = list(program.ranks[0])
    order = sorted(range(len(ops)), key=lambda i: ("F", "SEND_F", "RECV_B", "B").index(ops[i].kind.name))
    place = {old: new for new, old in enumerate(order)}
    ops = [ops[old]._replace(deps=tuple(sorted(place[d] for d in ops[old].deps))) for old in order]
    program = with_rank(program, 0, ops)
    assert why_broken(per_pair(program)) is None
    verify(per_pair(program))


def test_a_communicator_serves_in_the_order_of_launches_across_lanes() -> None:
    """Gradients on the group of the experts, on a lane of their own: the next exchange waits for them."""
    program = replicate(expand(build("1f1b", 1, 1), [LayerShape()], reduce=True), 2)
    shared = replace(program, communicators={"dp0": "one", "ep0": "one"})
    edges = [len(op_graph(p).hard.after) for p in (program, shared)]
    assert edges[1] > edges[0]
    verify(shared)
    other = list(shared.ranks[1])
    last = next(i for i, op in enumerate(other) if op.kind is kinds.REDUCE)
    assert last == len(other) - 1
