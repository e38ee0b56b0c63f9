"""The graph of a program: what must have ended before an op can start.

Nodes are ops in rank order, then helper nodes. Hard edges hold on every machine: data dependencies and
lane order. Host edges hold where compute runs inline on the host, as it does on CPU: what is launched
after such an op cannot start before it has ended. Nodes that meet (a send and its receive, the members
of a collective) form one vertex, so no buffering is assumed anywhere. A topological order of the
vertices therefore proves that the program ends, whatever the timing and on both kinds of host;
without one, the cycle is put into words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeclipse.core.errors import ScheduleError

Ints = npt.NDArray[np.int64]
DATA, LANE, WIRE, HOST = range(4)
REASONS = {
    DATA: "needs",
    LANE: "waits on its lane for",
    WIRE: "waits on the same wire for",
    HOST: "is launched after the host has finished",
}
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
    reason: Ints
    lag: Ints

    @staticmethod
    def join(pieces: Sequence[tuple[Ints, Ints, int]]) -> Edges:
        """From (source, target, reason) triples."""
        reasons = [np.full(len(source), reason, dtype=np.int64) for source, _, reason in pieces]
        source = np.concatenate([source for source, _, _ in pieces])
        return Edges(
            source=source,
            target=np.concatenate([target for _, target, _ in pieces]),
            reason=np.concatenate(reasons),
            lag=np.zeros(len(source), dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Sorted: `order` lists the vertices so that each comes after everything it waits for."""

    num_nodes: int
    num_ops: int
    hard: Successors
    host: Successors
    order: list[int]
    vertex: list[int] | None = None
    """Vertex of each node; None: every node is its own vertex."""
    members: list[list[int]] | None = None
    """Nodes of each vertex."""
    transfers: ImpliedTransfers | None = None


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
    hard = Successors.build(num_nodes, edges.source[~is_host], edges.target[~is_host])
    host = Successors.build(num_nodes, edges.source[is_host], edges.target[is_host], edges.lag[is_host])
    if vertex is None or members is None:
        waiting = np.bincount(edges.target, minlength=num_nodes).tolist()
        order = _sort_nodes(waiting, hard, host)
        complete = len(order) == num_nodes
    else:
        by_vertex = np.asarray(vertex, dtype=np.int64)
        waiting = np.bincount(by_vertex[edges.target], minlength=len(members)).tolist()
        order = _sort_vertices(waiting, hard, host, vertex, members)
        complete = len(order) == len(members)
    if not complete:
        stuck = [v for v, count in enumerate(waiting) if count]
        raise ScheduleError(_describe_cycle(stuck, edges, vertex, name))
    return Graph(
        num_nodes=num_nodes,
        num_ops=num_ops,
        hard=hard,
        host=host,
        order=order,
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
