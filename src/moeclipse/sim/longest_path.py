"""Times of a program when lanes do not slow each other: one pass over the proved order.

An op starts when its lane, its inputs and its host let it; a meeting starts when its last peer has
launched. Since the verifier has sorted the graph, one walk settles every time, and a million actions
take seconds. `events` computes the same with an event queue and contention; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeclipse.schedule.graph import Graph
from moeclipse.schedule.waves import Waves

Series = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Per node: when it was launched with all inputs ready, when it started, when it ended."""

    ready: Series
    start: Series
    finish: Series


def longest_path(
    graph: Graph,
    duration: Series,
    earliest: list[float],
    *,
    peers: dict[int, list[int]],
    launch: float,
    inline_compute: bool,
) -> Times:
    """`earliest` (host launch times) is used up; `peers` lists the nodes a meeting node waits for."""
    if isinstance(graph.found, Waves):
        start, finish = graph.found.longest_path(np.asarray(duration), inline_compute)
        return Times(ready=start, start=start, finish=finish)
    if graph.members is None:
        return _plain(graph, duration, earliest, inline_compute)
    ready, begun, ended = earliest, [0.0] * graph.num_nodes, [0.0] * graph.num_nodes
    hard, host = graph.hard, graph.host
    for v in graph.order:
        nodes = graph.members[v]
        for node in nodes:
            begin = ready[node]
            for peer in peers.get(node, ()):
                if ready[peer] > begin:
                    begin = ready[peer]
            begun[node] = begin
            end = ended[node] = begin + duration[node]
            for after in hard.after[hard.first[node] : hard.first[node + 1]]:
                if end > ready[after]:
                    ready[after] = end
            if inline_compute:
                for index in range(host.first[node], host.first[node + 1]):
                    released = end + host.lag[index] * launch
                    if released > ready[host.after[index]]:
                        ready[host.after[index]] = released
    return Times(ready=ready, start=begun, finish=ended)


def _plain(graph: Graph, duration: Series, start: list[float], inline_compute: bool) -> Times:
    """Every node its own vertex (programs of whole actions): the hot loop of large simulations."""
    finish = [0.0] * graph.num_nodes
    first, after = graph.hard.first, graph.hard.after
    host_first, host_after = graph.host.first, graph.host.after
    for node in graph.order:
        end = start[node] + duration[node]
        finish[node] = end
        for target in after[first[node] : first[node + 1]]:
            if end > start[target]:
                start[target] = end
        if inline_compute:
            for target in host_after[host_first[node] : host_first[node + 1]]:
                if end > start[target]:
                    start[target] = end
    return Times(ready=start, start=start, finish=finish)
