"""The graph of a program whose communication stands in its lists, built op by op.

Ops that meet (`meetings`) are one vertex. The wire is that of streams: an op occupies its lane, and its
communicator, from the moment it comes to their heads until the others have come and it has ended; whatever
was launched behind it on either waits. A host that meets others in its calls has fewer edges, not other ones
(its transfers wait for nothing on their lanes), so one order proves a program for both.

Hazard: where compute runs inline on the host, a communication op whose input comes from another one makes
the host wait too. Such a wait is a helper node, so that what is launched behind it is known to wait as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.graph import DATA, HOST, LANE, WIRE, Edges, Graph, sort_graph
from moeclipse.schedule.kinds import AWAITED, COPIES
from moeclipse.schedule.meetings import match
from moeclipse.schedule.op import Op, Program


class _Collector:
    """Edges while they are found."""

    def __init__(self, num_ops: int) -> None:
        self.source: list[int] = []
        self.target: list[int] = []
        self.reason: list[int] = []
        self.lag: list[int] = []
        self.num_nodes = num_ops

    def add(self, source: int, target: int, reason: int, lag: int = 0) -> None:
        self.source.append(source)
        self.target.append(target)
        self.reason.append(reason)
        self.lag.append(lag)

    def edges(self) -> Edges:
        columns = (np.array(c, dtype=np.int64) for c in (self.source, self.target, self.reason, self.lag))
        source, target, reason, lag = columns
        return Edges(source=source, target=target, reason=reason, lag=lag)


def op_graph(program: Program) -> Graph:
    """Check deps and communicators, contract what meets, and sort."""
    num_ops = program.num_ops
    collector = _Collector(num_ops)
    waits: dict[int, str] = {}
    begin = 0
    for rank, ops in enumerate(program.ranks):
        _rank_edges(rank, ops, begin, collector, waits)
        _communicator_edges(ops, begin, program.communicators, collector)
        begin += len(ops)
    meetings = match(program)
    members: list[list[int]] = [[node for _, node in meeting] for meeting in meetings]
    vertex = [-1] * collector.num_nodes
    for index, nodes in enumerate(members):
        for node in nodes:
            vertex[node] = index
    for node in range(collector.num_nodes):
        if vertex[node] < 0:
            vertex[node] = len(members)
            members.append([node])
    names = NodeNames(program, waits)
    return sort_graph(collector.num_nodes, num_ops, collector.edges(), names, vertex=vertex, members=members)


class NodeNames:
    """`2F0 on rank 1` for a node number."""

    def __init__(self, program: Program, waits: dict[int, str]) -> None:
        self.program, self.waits = program, waits

    def __call__(self, node: int) -> str:
        if node in self.waits:
            return self.waits[node]
        for rank, ops in enumerate(self.program.ranks):
            if node < len(ops):
                return f"{ops[node]} on rank {rank}"
            node -= len(ops)
        raise AssertionError("node numbers come from the same program")


def _rank_edges(
    rank: int, ops: Sequence[Op], begin: int, collector: _Collector, waits: dict[int, str]
) -> None:
    last_on_lane: dict[str, int] = {}
    blocker, launched = -1, 0  # the last thing the host waited for, and launches since
    for position, op in enumerate(ops):
        node = begin + position
        for dep in op.deps:
            if not 0 <= dep < position:
                other = ops[dep] if 0 <= dep < len(ops) else f"position {dep}"
                raise ScheduleError(
                    f"{op} on rank {rank} stands at position {position} and needs {other} at position {dep}, "
                    "which is not launched before it; put what is needed first"
                )
            collector.add(begin + dep, node, DATA)
        previous = last_on_lane.get(op.lane)
        if previous is not None:
            collector.add(previous, node, LANE)
        last_on_lane[op.lane] = node
        launched += 1
        if op.comm is not None and op.kind not in COPIES:
            awaited = [d for d in op.deps if ops[d].comm is not None]
            if awaited:
                wait = collector.num_nodes
                collector.num_nodes += 1
                waits[wait] = f"the host of rank {rank} before {op}"
                for dep in awaited:
                    collector.add(begin + dep, wait, HOST)
                if blocker >= 0:
                    collector.add(blocker, wait, HOST, launched - 1)
                blocker, launched = wait, 1
        if blocker >= 0:
            collector.add(blocker, node, HOST, launched)
        if op.comm is None or op.kind in AWAITED:
            blocker, launched = node, 0


def _communicator_edges(
    ops: Sequence[Op], begin: int, shared: Mapping[str, str], collector: _Collector
) -> None:
    """First come, first served, where lane order does not say so already."""
    last: dict[str, int] = {}
    for position, op in enumerate(ops):
        if op.comm is not None:
            communicator = shared.get(op.comm[0], op.comm[0])
            before = last.get(communicator)
            if before is not None and ops[before].lane != op.lane:
                collector.add(begin + before, begin + position, WIRE)
            last[communicator] = position
