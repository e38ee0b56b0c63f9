"""The graph of a program whose communication stands in its lists, built op by op.

The k-th op of a rank on a group meets the k-th op of every other member: a send its receive, a
collective its fellows. They must say the same thing, and then they are one vertex.

Hazard: where compute runs inline on the host, a communication op whose input comes from another
communication lane makes the host wait too. Such a wait is a helper node, so that what is launched
behind it is known to wait as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.graph import DATA, HOST, LANE, Edges, Graph, sort_graph
from moeclipse.schedule.kinds import TRANSFERS, Form, Part
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
        if op.comm is not None:
            foreign = [d for d in op.deps if ops[d].comm is not None and ops[d].lane != op.lane]
            if foreign:
                wait = collector.num_nodes
                collector.num_nodes += 1
                waits[wait] = f"the host of rank {rank} before {op}"
                for dep in foreign:
                    collector.add(begin + dep, wait, HOST)
                if blocker >= 0:
                    collector.add(blocker, wait, HOST, launched - 1)
                blocker, launched = wait, 1
        if blocker >= 0:
            collector.add(blocker, node, HOST, launched)
        if op.comm is None:
            blocker, launched = node, 0


def match(program: Program) -> list[list[tuple[int, int]]]:
    """(rank, node) of the ops that meet; raises when two members of a group disagree."""
    launched: dict[str, dict[int, list[tuple[int, Op]]]] = {}
    node = 0
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if op.comm is not None:
                launched.setdefault(op.comm[0], {}).setdefault(rank, []).append((node, op))
            node += 1
    meetings: list[list[tuple[int, int]]] = []
    for group, by_rank in launched.items():
        members = program.groups.get(group)
        if members is None:
            known = ", ".join(sorted(program.groups)) or "none"
            raise ScheduleError(f"group {group!r} has no members listed; known groups: {known}")
        strangers = sorted(set(by_rank) - set(members))
        if strangers:
            rank, op = strangers[0], by_rank[strangers[0]][0][1]
            raise ScheduleError(
                f"{op} on rank {rank} uses group {group!r}, whose members are {list(members)}"
            )
        meetings += _match_group(program, group, members, by_rank)
    return meetings


def _match_group(
    program: Program, group: str, members: Sequence[int], by_rank: dict[int, list[tuple[int, Op]]]
) -> list[list[tuple[int, int]]]:
    lists = [by_rank.get(rank, []) for rank in members]
    if len(members) == 1:  # nobody to meet: the order alone can be wrong
        for k, (_, op) in enumerate(lists[0]):
            if op.comm != (group, k):
                raise ScheduleError(
                    f"group {group!r}: op number {k} of rank {members[0]} is {op}, numbered {op.comm}"
                )
        return []
    meetings = []
    for k in range(max(map(len, lists))):
        present = [
            (rank, entries[k]) for rank, entries in zip(members, lists, strict=True) if k < len(entries)
        ]
        lead_rank, (_, lead) = present[0]
        for rank, (_, op) in present:
            assert op.comm is not None
            if _signature(program, op) != _signature(program, lead) or op.comm[1] != k:
                raise ScheduleError(
                    f"group {group!r}: op number {k} is {lead} on rank {lead_rank} but {op} (numbered "
                    f"{op.comm[1]}) on rank {rank}; all members must launch the same ops in the same order"
                )
        missing = [rank for rank, entries in zip(members, lists, strict=True) if k >= len(entries)]
        if missing:
            raise ScheduleError(
                f"group {group!r}: {lead} on rank {lead_rank} meets nothing, because rank {missing[0]} "
                f"launches only {len(by_rank.get(missing[0], []))} ops there; a matching op is missing"
            )
        _check_directions(group, present)
        _check_peers(group, members, present)
        meetings.append([(rank, node) for rank, (node, _) in present])
    return meetings


def _signature(program: Program, op: Op) -> tuple[object, ...]:
    """What matched ops must agree on; a transfer is named by its sending stage on both sides."""
    if op.kind not in TRANSFERS:
        return (op.kind, op.stage, op.layer, op.microbatch, op.step, op.chunk, op.chunks, op.expert)
    stage, form = op.stage, op.kind.form
    if op.kind.part is Part.RECV and stage is not None:
        placement = program.pipeline().placement
        stage = placement.previous_stage(stage) if form is Form.F else placement.next_stage(stage)
    return (form, stage, op.microbatch)


def _check_directions(group: str, present: Sequence[tuple[int, tuple[int, Op]]]) -> None:
    for index, (rank, (_, op)) in enumerate(present):
        if op.kind in TRANSFERS:
            expected = Part.RECV if index else Part.SEND
            if op.kind.part is not expected:
                raise ScheduleError(
                    f"group {group!r} flows one way: {op} on rank {rank} should be a {expected.name}"
                )


def _check_peers(group: str, members: Sequence[int], present: Sequence[tuple[int, tuple[int, Op]]]) -> None:
    peers = {rank: set(op.peers) or set(members) for rank, (_, op) in present}
    for rank, (_, op) in present:
        for peer in sorted(peers[rank]):
            if peer not in peers or (peer != rank and rank not in peers[peer]):
                raise ScheduleError(
                    f"group {group!r}: {op} on rank {rank} exchanges with rank {peer}, but not the reverse"
                )
