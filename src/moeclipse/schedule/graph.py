"""The graph of a program: what must have ended before an op can start.

Nodes are ops in rank order, then helper nodes. Hard edges hold on every machine: data dependencies and
lane order. Host edges hold where compute runs inline on the host, as it does on CPU: what is launched
after such an op cannot start before it has ended. Nodes that meet (a send and its receive, the members
of a collective) form one vertex, so no buffering is assumed anywhere. A topological order of the
vertices therefore proves that the program ends, whatever the timing and on both kinds of host;
without one, the cycle is put into words. Where compute runs on a device, its stream is such a host: a
transfer starts behind all that was launched there before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.waves import Waves, sort_in_waves

Ints = npt.NDArray[np.int64]
DATA, LANE, WIRE, HOST = range(4)
REASONS = {
    DATA: "needs",
    LANE: "waits on its lane for",
    WIRE: "waits on the same wire for",
    HOST: "is launched after the host has finished",
}
MANY = 300_000
"""Nodes from which a graph is sorted wave by wave."""
LONGEST_PRINTED = 16
"""A longer cycle is cut in the middle: the eye needs its ends."""


@dataclass(frozen=True, kw_only=True)
class Successors:
    """Edges in compressed rows: those of node n are after[first[n] : first[n + 1]]."""

    first: list[int]
    after: list[int]
    lag: list[int]
    """Host launches between the two ends (host edges only)."""

    @staticmethod
    def build(num_nodes: int, source: Ints, target: Ints, lag: Ints | None = None) -> Successors:
        by_source = np.argsort(source, kind="stable")
        first = np.zeros(num_nodes + 1, dtype=np.int64)
        np.cumsum(np.bincount(source, minlength=num_nodes), out=first[1:])
        return Successors(
            first=first.tolist(),
            after=target[by_source].tolist(),
            lag=[] if lag is None else lag[by_source].tolist(),
        )


@dataclass(frozen=True, kw_only=True)
class Edges:
    """Every edge with its reason; `lag` counts host launches and matters for host edges alone."""

    source: Ints
    target: Ints
    reason: npt.NDArray[np.int8] | Ints
    lag: Ints

    @staticmethod
    def join(pieces: Sequence[tuple[Ints, Ints, int]]) -> Edges:
        """From (source, target, reason) triples."""
        reasons = [np.full(len(source), reason, dtype=np.int8) for source, _, reason in pieces]
        source = np.concatenate([source for source, _, _ in pieces])
        return Edges(
            source=source,
            target=np.concatenate([target for _, target, _ in pieces]),
            reason=np.concatenate(reasons),
            lag=np.zeros(len(source), dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class Lists:
    """A graph that was sorted vertex by vertex."""

    hard: Successors
    host: Successors
    order: list[int]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Sorted: `order` lists the vertices so that each comes after everything it waits for."""

    num_nodes: int
    num_ops: int
    found: Lists | Waves
    """Large graphs are sorted in waves, and become lists where somebody asks for lists."""
    vertex: list[int] | None = None
    """Vertex of each node; None: every node is its own vertex."""
    members: list[list[int]] | None = None
    """Nodes of each vertex."""
    transfers: ImpliedTransfers | None = None

    @cached_property
    def lists(self) -> Lists:
        if isinstance(self.found, Lists):
            return self.found
        hard, host = (
            Successors(first=rows.first.tolist(), after=rows.after.tolist(), lag=[0] * len(rows.after))
            for rows in (self.found.hard, self.found.host)
        )
        return Lists(hard=hard, host=host, order=self.found.order.tolist())

    @property
    def hard(self) -> Successors:
        return self.lists.hard

    @property
    def host(self) -> Successors:
        return self.lists.host

    @property
    def order(self) -> list[int]:
        return self.lists.order

    def order_by(self, place: Sequence[int]) -> list[int]:
        """The ops so that each comes after everything it waits for; of those that could come next, the one of
        the smallest place (of a vertex: of its first member). Helper nodes are left out."""
        members = self.members or [[node] for node in range(self.num_nodes)]
        vertex = self.vertex or range(self.num_nodes)
        waiting = [0] * len(members)
        for edges in (self.hard, self.host):
            for after in edges.after:
                waiting[vertex[after]] += 1
        # A helper node stands for a wait: nothing is launched for it, so it never holds others up.
        rank = [min((place[node] for node in nodes if node < self.num_ops), default=-1) for nodes in members]
        free = [(rank[v], v) for v, count in enumerate(waiting) if not count]
        heapify(free)
        order: list[int] = []
        while free:
            _, v = heappop(free)
            for node in members[v]:
                if node < self.num_ops:
                    order.append(node)
                for edges in (self.hard, self.host):
                    for target in edges.after[edges.first[node] : edges.first[node + 1]]:
                        waiting[vertex[target]] -= 1
                        if not waiting[vertex[target]]:
                            heappush(free, (rank[vertex[target]], vertex[target]))
        return order


@dataclass(frozen=True, kw_only=True)
class ImpliedTransfers:
    """Transfers that follow from the placement: nodes num_ops, num_ops + 1, ..."""

    source: Ints
    destination: Ints
    stage: Ints
    """The sending stage."""
    microbatch: Ints
    is_forward: npt.NDArray[np.bool_]


def sort_graph(
    num_nodes: int,
    num_ops: int,
    edges: Edges,
    name: Callable[[int], str],
    *,
    vertex: list[int] | None = None,
    members: list[list[int]] | None = None,
    transfers: ImpliedTransfers | None = None,
) -> Graph:
    """Order the vertices; raise with a cycle in words if there is none."""
    is_host = edges.reason == HOST
    if vertex is None and num_nodes >= MANY and not edges.lag.any():
        found, waiting = sort_in_waves(num_nodes, edges.source, edges.target, is_host)
        if waiting.any():
            stuck = np.flatnonzero(waiting).tolist()
            raise ScheduleError(_describe_cycle(stuck, edges, vertex, name))
        return Graph(num_nodes=num_nodes, num_ops=num_ops, found=found, transfers=transfers)
    hard = Successors.build(num_nodes, edges.source[~is_host], edges.target[~is_host])
    host = Successors.build(num_nodes, edges.source[is_host], edges.target[is_host], edges.lag[is_host])
    if vertex is None or members is None:
        counts = np.bincount(edges.target, minlength=num_nodes).tolist()
        order = _sort_nodes(counts, hard, host)
        complete = len(order) == num_nodes
    else:
        by_vertex = np.asarray(vertex, dtype=np.int64)
        counts = np.bincount(by_vertex[edges.target], minlength=len(members)).tolist()
        order = _sort_vertices(counts, hard, host, vertex, members)
        complete = len(order) == len(members)
    if not complete:
        stuck = [v for v, count in enumerate(counts) if count]
        raise ScheduleError(_describe_cycle(stuck, edges, vertex, name))
    return Graph(
        num_nodes=num_nodes,
        num_ops=num_ops,
        found=Lists(hard=hard, host=host, order=order),
        vertex=vertex,
        members=members,
        transfers=transfers,
    )


def _sort_nodes(waiting: list[int], hard: Successors, host: Successors) -> list[int]:
    """Last freed, first taken: staying on one rank while it can makes large graphs a third faster."""
    free = [node for node, count in enumerate(waiting) if not count]
    order: list[int] = []
    hard_first, hard_after, host_first, host_after = hard.first, hard.after, host.first, host.after
    while free:
        node = free.pop()
        order.append(node)
        for after in hard_after[hard_first[node] : hard_first[node + 1]]:
            left = waiting[after] - 1
            waiting[after] = left
            if not left:
                free.append(after)
        for after in host_after[host_first[node] : host_first[node + 1]]:
            left = waiting[after] - 1
            waiting[after] = left
            if not left:
                free.append(after)
    return order


def _sort_vertices(
    waiting: list[int], hard: Successors, host: Successors, vertex: list[int], members: list[list[int]]
) -> list[int]:
    order = [v for v, count in enumerate(waiting) if not count]
    for v in order:  # grows while it is walked
        for node in members[v]:
            for edges in (hard, host):
                first = edges.first
                for target in edges.after[first[node] : first[node + 1]]:
                    after = vertex[target]
                    left = waiting[after] - 1
                    waiting[after] = left
                    if not left:
                        order.append(after)
    return order


def _describe_cycle(
    stuck: list[int], edges: Edges, vertex: list[int] | None, name: Callable[[int], str]
) -> str:
    """Words for a short cycle among the vertices that never became free."""
    to_vertex = np.arange(int(edges.target.max()) + 1) if vertex is None else np.asarray(vertex)
    limit = int(to_vertex.max()) + 1
    inside = np.zeros(limit, dtype=bool)
    inside[stuck] = True
    before: dict[int, list[tuple[int, int]]] = {}
    for index in np.flatnonzero(inside[to_vertex[edges.source]] & inside[to_vertex[edges.target]]):
        source = int(to_vertex[edges.source[index]])
        before.setdefault(int(to_vertex[edges.target[index]]), []).append((source, int(index)))
    # Walk back until a vertex repeats; the walk then lies on a cycle, but rarely on the shortest.
    seen: dict[int, int] = {}
    at = next(v for v in stuck if v in before)
    while at not in seen:
        seen[at] = len(seen)
        at = before[at][0][0]
    loop = list(seen)[seen[at] :]
    path = min((_shortest_loop(v, before) for v in loop[:8]), key=len)
    lines = [
        f"  {name(int(edges.target[i]))} {REASONS[int(edges.reason[i])]} {name(int(edges.source[i]))}"
        for i in path
    ]
    if len(lines) > LONGEST_PRINTED:
        half = LONGEST_PRINTED // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} more ...", *lines[-half:]]
    return "deadlock: these ops wait for each other in a circle\n" + "\n".join(lines)


def _shortest_loop(start: int, before: dict[int, list[tuple[int, int]]]) -> list[int]:
    """Edges of a shortest cycle through `start`, each target waiting for the next edge's target."""
    came: dict[int, tuple[int, int]] = {}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        for source, index in before.get(at, ()):
            if source == start:
                path = [index]
                while at != start:
                    at, step = came[at]
                    path.append(step)
                return path[::-1]
            if source not in came:
                came[source] = (at, index)
                queue.append(source)
    raise AssertionError("the vertex was taken from a cycle")
