"""The simulator: how long a verified program takes on given costs, and where the time goes.

    verify -> durations -> longest path (or event queue, where lanes contend) -> Simulation

Contract: it takes what the verifier returned (or verifies first), so what is timed is what was proved.
The unit of time is that of the costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import ActionColumns, Program
from moeclipse.schedule.waves import Waves
from moeclipse.sim.durations import checked_durations, column_durations, table_durations
from moeclipse.sim.events import EventQueue
from moeclipse.sim.longest_path import Series, Times, longest_path

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Times of every op, in rank order; transfers that follow from the placement stand behind them."""

    verified: Verified
    costs: Costs
    ready: Floats
    start: Floats
    finish: Floats
    begin: tuple[int, ...]
    """First op of each rank, and the end."""

    @property
    def program(self) -> Program:
        return self.verified.program

    @property
    def makespan(self) -> float:
        return float(self.finish.max()) if len(self.finish) else 0.0

    def rank_slice(self, rank: int) -> slice:
        return slice(self.begin[rank], self.begin[rank + 1])


def simulate(
    program: Program | Verified, costs: Costs, durations: Sequence[Sequence[float]] | None = None
) -> Simulation:
    """Time a program. `durations` (per rank, per op) replaces the table where sizes differ between ops."""
    verified = program if isinstance(program, Verified) else verify(program)
    needs_lists = bool(costs.contention) or costs.launch > 0
    if not verified.program.explicit and needs_lists:
        if durations is not None:
            raise ScheduleError(
                "durations of a program of whole actions cannot go with launch cost or contention"
            )
        verified = verify(lower(verified.program))
    program = verified.program
    if costs.rank_speed and len(costs.rank_speed) != program.num_ranks:
        raise ScheduleError(f"{len(costs.rank_speed)} rank speeds were given for {program.num_ranks} ranks")
    implied = verified.graph.transfers is not None
    rest = costs.wire if implied else 0.0
    seconds = _durations(program, costs, durations, verified.graph.num_nodes, rest)
    times = _run(verified, costs, seconds)
    begin = np.concatenate([[0], np.cumsum(program.sizes)])
    # Helper nodes that only make a host wait are no work: they are left out of the result.
    shown = verified.graph.num_nodes if implied else verified.graph.num_ops
    return Simulation(
        verified=verified,
        costs=costs,
        ready=np.asarray(times.ready[:shown]),
        start=np.asarray(times.start[:shown]),
        finish=np.asarray(times.finish[:shown]),
        begin=tuple(int(index) for index in begin),
    )


def _durations(
    program: Program, costs: Costs, given: Sequence[Sequence[float]] | None, num_nodes: int, rest: float
) -> Series:
    """Of all nodes; those that are no op of a list take `rest`."""
    if given is None and isinstance(program.ranks, ActionColumns):
        columns = column_durations(program.ranks, costs)
        return np.concatenate([columns, np.full(num_nodes - len(columns), rest)])
    flat = table_durations(program, costs) if given is None else checked_durations(program, given)
    return flat + [rest] * (num_nodes - len(flat))


def _run(verified: Verified, costs: Costs, durations: Series) -> Times:
    program, graph = verified.program, verified.graph
    in_waves = isinstance(graph.found, Waves)
    earliest = [] if in_waves else [0.0] * graph.num_nodes
    peers: dict[int, list[int]] = {}
    if program.explicit:
        peers = _peer_nodes(verified)
        if costs.launch:
            node = 0
            for ops in program.ranks:
                for position in range(len(ops)):
                    earliest[node] = (position + 1) * costs.launch
                    node += 1
    if not costs.contention:
        return longest_path(
            graph, durations, earliest, peers=peers, launch=costs.launch, inline_compute=costs.inline_compute
        )
    lanes = [op.lane.split(":")[0] for ops in program.ranks for op in ops]
    ranks = [rank for rank, ops in enumerate(program.ranks) for _ in ops]
    helpers = graph.num_nodes - len(lanes)
    queue = EventQueue(
        graph,
        durations,
        earliest,
        lanes=lanes + ["host"] * helpers,
        ranks=ranks + [-1] * helpers,
        peers=peers,
        contention=costs.contention,
        launch=costs.launch,
        inline_compute=costs.inline_compute,
    )
    return queue.run()


def _peer_nodes(verified: Verified) -> dict[int, list[int]]:
    """For every op that meets others: the nodes (its own among them) that must have been launched."""
    graph, program = verified.graph, verified.program
    if graph.members is None:
        return {}
    ops = [op for rank_ops in program.ranks for op in rank_ops]
    rank_of = [rank for rank, rank_ops in enumerate(program.ranks) for _ in rank_ops]
    peers: dict[int, list[int]] = {}
    for nodes in graph.members:
        if len(nodes) < 2:
            continue
        by_rank = {rank_of[node]: node for node in nodes}
        for node in nodes:
            named = ops[node].peers
            peers[node] = [by_rank[peer] for peer in named] if named else nodes
            if node not in peers[node]:
                peers[node] = [node, *peers[node]]
    return peers
