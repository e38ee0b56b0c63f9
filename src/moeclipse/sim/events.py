"""Times of a program by an event queue, with lanes of one rank slowing each other down.

While an op runs on one lane and another lane of its rank is busy, it runs at the product of the rates that
the costs give for its lane beside each busy one; two wires of a rank may slow each other too. Whenever a lane
of a rank starts or ends, the remaining work of what else runs there is brought up to date and its end moved.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from moeclipse.schedule.graph import Graph
from moeclipse.sim.longest_path import Series, Times

EPSILON = 1e-12
RELEASE, END = 0, 1


class _Running:
    """One op under way."""

    __slots__ = ("lane", "left", "node", "rate", "since", "version")

    def __init__(self, node: int, lane: str, left: float, now: float) -> None:
        self.node, self.lane, self.left, self.since = node, lane, left, now
        self.rate, self.version = 1.0, 0


class EventQueue:
    """The simulation; `run` returns the same Times as `longest_path` where nothing contends."""

    def __init__(
        self,
        graph: Graph,
        duration: Series,
        earliest: list[float],
        *,
        lanes: Sequence[str],
        ranks: Sequence[int],
        peers: dict[int, list[int]],
        contention: Mapping[tuple[str, str], float],
        launch: float,
        inline_compute: bool,
    ) -> None:
        self.graph, self.duration, self.ready = graph, duration, earliest
        self.lanes, self.ranks, self.peers = lanes, ranks, peers
        self.contention, self.launch, self.inline = contention, launch, inline_compute
        self.start = [0.0] * graph.num_nodes
        self.finish = [0.0] * graph.num_nodes
        self.running: dict[int, dict[int, _Running]] = {}
        self.heap: list[tuple[float, int, int, int]] = []
        self.waiting = self._count_predecessors()
        self.absent = {node: len(nodes) for node, nodes in peers.items()}

    def _count_predecessors(self) -> list[int]:
        waiting = [0] * self.graph.num_nodes
        for target in self.graph.hard.after:
            waiting[target] += 1
        if self.inline:
            for target in self.graph.host.after:
                waiting[target] += 1
        return waiting

    def run(self) -> Times:
        for node, count in enumerate(self.waiting):
            if not count:
                heapq.heappush(self.heap, (self.ready[node], RELEASE, node, 0))
        while self.heap:
            now, what, node, version = heapq.heappop(self.heap)
            if what == RELEASE:
                self._launch(node, now)
            else:
                op = self.running.get(self.ranks[node], {}).get(node)
                if op is not None and op.version == version:
                    self._end(op, now)
        return Times(ready=self.ready, start=self.start, finish=self.finish)

    def _launch(self, node: int, now: float) -> None:
        """All inputs of `node` are there; a meeting starts for whoever has all its peers."""
        self.ready[node] = now
        peers = self.peers.get(node)
        if not peers:
            self._begin(node, now)
            return
        for peer in peers:
            self.absent[peer] -= 1
            if not self.absent[peer]:
                self._begin(peer, now)

    def _begin(self, node: int, now: float) -> None:
        self.start[node] = now
        rank = self.ranks[node]
        op = _Running(node, self.lanes[node], self.duration[node], now)
        self.running.setdefault(rank, {})[node] = op
        self._update(rank, now, fresh=op)

    def _end(self, op: _Running, now: float) -> None:
        node, rank = op.node, self.ranks[op.node]
        del self.running[rank][node]
        self.finish[node] = now
        self._update(rank, now)
        hard, host = self.graph.hard, self.graph.host
        for after in hard.after[hard.first[node] : hard.first[node + 1]]:
            self._release(after, now)
        if self.inline:
            for index in range(host.first[node], host.first[node + 1]):
                self._release(host.after[index], now + host.lag[index] * self.launch)

    def _release(self, node: int, when: float) -> None:
        self.ready[node] = max(self.ready[node], when)
        self.waiting[node] -= 1
        if not self.waiting[node]:
            heapq.heappush(self.heap, (self.ready[node], RELEASE, node, 0))

    def _update(self, rank: int, now: float, fresh: _Running | None = None) -> None:
        """Settle the work done so far on `rank` and move the ends that changed."""
        ops = self.running[rank]
        busy = Counter(op.lane for op in ops.values())
        for op in ops.values():
            rate = 1.0
            for other, count in busy.items():
                if other != op.lane or count > 1:
                    rate *= self.contention.get((op.lane, other), 1.0)
            if op is fresh or abs(rate - op.rate) > EPSILON:
                op.left = max(0.0, op.left - (now - op.since) * op.rate)
                op.since, op.rate = now, rate
                op.version += 1
                heapq.heappush(self.heap, (now + op.left / rate, END, op.node, op.version))
