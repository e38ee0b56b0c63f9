"""The verifier: a program that passes here ends, whatever the timing, and computes each thing once.

It checks, in this order: the exact set of ops; the independence of the F and B of every pair; that what
communicates names everyone it meets; that every op says what it holds; equal order on every communicator;
deadlock freedom without buffering; that everything an op reads has ended before it starts; and peak
activation memory per rank against a bound. Messages name the ops.

A program must pass on two kinds of wire, and what passes here passes on both:

    streams  (NCCL)  a transfer occupies its lane and its communicator until the others have come; lanes
                     are in order, so who waits for a transfer has waited for those before it on its lane
    host     (gloo)  a transfer is under way beside everything: only who waits for it knows that it has ended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.action_graph import ActionTable, action_graph, tabulate
from moeclipse.schedule.contents import check_contents
from moeclipse.schedule.graph import Graph
from moeclipse.schedule.kinds import AWAITED, Kind
from moeclipse.schedule.meetings import check_launches
from moeclipse.schedule.memory import Floats, memory_columns, memory_of
from moeclipse.schedule.needs import exchange_sources, pipeline_sources
from moeclipse.schedule.op import ActionColumns, Op, Program
from moeclipse.schedule.op_graph import op_graph
from moeclipse.schedule.shape import ExchangeShape, PipelineShape
from moeclipse.schedule.whole_step import hosts_where_they_meet

CELLS: dict[str, tuple[Kind, ...]] = {
    "F": (kinds.F,),
    "dX": (kinds.B, kinds.I),
    "dW": (kinds.B, kinds.W),
}
"""What a stage computes of a microbatch, and the actions that compute it."""
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A program that has passed, with its sorted graph; simulator and executor take nothing else."""

    program: Program
    graph: Graph
    peak: tuple[float, ...]
    """Most memory held at once on each rank, in the unit of alloc and free, in launch order."""

    def proved_order(self, rank: int) -> list[int]:
        """This rank's ops by position, in one order of all ranks' ops in which each comes after all that it
        needs, and both ends of a transfer at once: whoever runs it so may finish each op before the next.

        Of all such orders the one next to the program's own: a receive that the program launches early comes
        as soon as its sender can send."""
        starts = np.cumsum([0, *map(len, self.program.ranks)]).tolist()
        place = [position for ops in self.program.ranks for position in range(len(ops))]
        order = self.graph.order_by(place)
        mine = [node - starts[rank] for node in order if starts[rank] <= node < starts[rank + 1]]
        shape = self.program.shape
        whole = isinstance(shape, PipelineShape) and shape.step is not None
        return hosts_where_they_meet(shape, self.program.ranks[rank], mine) if whole else mine  # type: ignore[arg-type]


def verify(program: Program, memory_limit: float | Sequence[float] | None = None) -> Verified:
    """Prove a program, or raise ScheduleError with the ops that are wrong."""
    columns = [memory_columns(program, rank) for rank in range(program.num_ranks)]
    if program.explicit:
        check_contents(program)
        _check_pairs(program)
        check_launches(program)
        _check_holdings(program)
        graph = op_graph(program)
        _check_needs(program)
    else:
        table = tabulate(program)
        _check_cells(program, table)
        _check_unit(table, columns)
        _check_pairs(program)
        graph = action_graph(program, table)
    peak = tuple(_launch_peak(*held) for held in columns)
    _check_memory(program, peak, memory_limit)
    return Verified(program=program, graph=graph, peak=peak)


def _check_holdings(program: Program) -> None:
    """alloc and free are what the ops hold."""
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            key = (op.kind, op.stage, op.layer, op.chunks, op.parts)
            if key not in known:
                known[key] = memory_of(program.shape, op)
            taken, given = known[key]
            if not (abs(op.alloc - taken) <= ROUNDING and abs(op.free - given) <= ROUNDING):
                raise ScheduleError(_wrong_holding(op, rank, taken, given))


def _check_unit(table: ActionTable, columns: Sequence[tuple[Floats, Floats]]) -> None:
    """The same for whole actions, all at once; what is kept as columns has nothing to say of its own."""
    program = table.program
    if isinstance(program.ranks, ActionColumns):
        return
    unit = program.pipeline().unit
    taken, given = (np.concatenate(column) for column in zip(*columns, strict=True))
    for leaves, said in (((kinds.F,), taken), ((kinds.B, kinds.W), given)):
        _, owners = table.of_kind(*leaves)
        expected = unit * np.bincount(owners, minlength=len(said))
        wrong = np.flatnonzero(~(np.abs(said - expected) <= ROUNDING))
        if len(wrong):
            op = table.op(int(wrong[0]))
            raise ScheduleError(_wrong_holding(op, int(table.rank[wrong[0]]), *memory_of(program.shape, op)))


def _wrong_holding(op: Op, rank: int, taken: float, given: float) -> str:
    return (
        f"{op} on rank {rank} says that it takes {op.alloc:g} and gives back {op.free:g}, "
        f"but it takes {taken:g} and gives back {given:g}"
    )


def _launch_peak(taken: Floats, given: Floats) -> float:
    """Most memory of a rank when ops run in launch order: each allocates before it frees."""
    if not len(taken):
        return 0.0
    return float((np.cumsum(taken) - np.concatenate([[0.0], np.cumsum(given)[:-1]])).max())


def _check_memory(program: Program, peak: Sequence[float], limit: float | Sequence[float] | None) -> None:
    if limit is None:
        return
    limits = [float(limit)] * len(peak) if isinstance(limit, int | float) else list(limit)
    if len(limits) != len(peak):
        raise ScheduleError(
            f"{len(limits)} memory limits were given for {len(peak)} ranks; give one, or one per rank"
        )
    for rank, (held, allowed) in enumerate(zip(peak, limits, strict=True)):
        if held > allowed * (1 + 1e-9):
            op = _first_above(program.ranks[rank], allowed)
            raise ScheduleError(
                f"{program.name}: rank {rank} holds {held:g} at its peak, more than the {allowed:g} allowed; "
                f"{op} is the first to exceed it. Try another schedule, recompute or smaller microbatches"
            )


def _first_above(ops: Sequence[Op], allowed: float) -> Op | None:
    held = 0.0
    for op in ops:
        held += op.alloc
        if held > allowed * (1 + 1e-9):
            return op
        held -= op.free
    return None


def _check_cells(program: Program, table: ActionTable) -> None:
    """Every (stage, microbatch) once: one F, and either one B or one I and one W, on the stage's rank."""
    shape = program.pipeline()
    M = shape.num_microbatches
    wanted = np.zeros(shape.placement.num_stages * M, dtype=np.int64)
    for stage in range(shape.placement.num_stages):
        microbatches = shape.microbatches_of(stage)
        wanted[stage * M + microbatches.start : stage * M + microbatches.stop] = 1
    rank_of = np.asarray(shape.placement.rank_of)
    misplaced = np.flatnonzero(rank_of[table.cell // M] != table.rank[table.owner])
    if len(misplaced):
        owner = int(table.owner[misplaced[0]])
        stage = int(table.cell[misplaced[0]]) // M
        where = f"stands on rank {table.rank[owner]}, but stage {stage} lives on rank {rank_of[stage]}"
        raise ScheduleError(f"{table.op(owner)} {where}")
    for what, makers in CELLS.items():
        cells, owners = table.of_kind(*makers)
        found = np.bincount(cells, minlength=len(wanted))
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            cell = int(wrong[0])
            culprits = [str(table.op(int(owner))) for owner in owners[cells == cell]]
            by = f" by {', '.join(culprits)}" if culprits else ""
            where = f"{what} of stage {cell // M}, microbatch {cell % M}"
            raise ScheduleError(
                f"{program.name}: {where} is computed {found[cell]} times{by} instead of {wanted[cell]} "
                f"({'/'.join(map(str, makers))} expected; {len(wrong)} cells are wrong)"
            )


def _check_pairs(program: Program) -> None:
    """A pair is one op, so neither half may need the other; within one microbatch B always needs F."""
    if isinstance(program.shape, ExchangeShape) or isinstance(program.ranks, ActionColumns):
        return
    pair, forward, backwards = kinds.PAIR, kinds.F, (kinds.B, kinds.I)  # looked up once for a million ops
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if op.kind is pair:
                if len(op.parts) != 2:
                    raise ScheduleError(f"{op} on rank {rank} must pair one F with one B")
                f, b = op.parts
                if f.kind is not forward or b.kind not in backwards:
                    raise ScheduleError(f"{op} on rank {rank} must pair one F with one B")
                if f.microbatch == b.microbatch:
                    raise ScheduleError(_dependent_pair(program.shape, op, rank))


def _dependent_pair(shape: PipelineShape, op: Op, rank: int) -> str:
    f, b = op.parts
    assert f.stage is not None
    assert b.stage is not None
    last = (f.stage // shape.placement.stages_per_chain + 1) * shape.placement.stages_per_chain - 1
    path = [f"{s}F{f.microbatch}" for s in range(f.stage, last + 1)]
    path += [f"{s}{b.kind}{b.microbatch}" for s in range(last, b.stage - 1, -1)]
    shown = path if len(path) <= 8 else [*path[:4], "...", *path[-3:]]
    return (
        f"deadlock: {op} on rank {rank} runs F and B of one microbatch as one op, but the B needs the F: "
        f"the cycle is {' -> '.join(shown)} -> (same op as {path[0]}); one more warm-up forward parts them"
    )


def _check_needs(program: Program) -> None:
    """Everything an op reads has ended on its rank, on both kinds of wire.

    Streams: through deps, lane order, or both in turn. Host: compute has ended, and a transfer once this op
    or one before it has listed it in deps, or the host has waited for it at once.
    """
    for rank, ops in enumerate(program.ranks):
        if isinstance(program.shape, ExchangeShape):
            wanted = exchange_sources(ops)
        else:
            wanted = pipeline_sources(program.shape, ops)
        ended = _ended_before(ops)
        place: list[int] = []
        count: dict[str, int] = {}
        for op in ops:
            place.append(count.get(op.lane, 0))
            count[op.lane] = place[-1] + 1
        awaited: set[int] = set()
        for position, sources in enumerate(wanted):
            awaited.update(ops[position].deps)
            for source in sources:
                if ended[position].get(ops[source].lane, -1) < place[source] or (
                    ops[source].comm is not None and source not in awaited
                ):
                    late = source > position
                    fault = "is launched only after it" if late else "may still run when it starts"
                    raise ScheduleError(
                        f"{ops[position]} on rank {rank} reads {ops[source]}, which {fault}; "
                        f"{'launch it first' if late else 'list it in deps'}"
                    )
            if ops[position].kind in AWAITED:
                awaited.add(position)


def _ended_before(ops: Sequence[Op]) -> list[dict[str, int]]:
    """For each op: on every lane, the last place known to have ended before it starts."""
    result: list[dict[str, int]] = []
    last_on_lane: dict[str, int] = {}
    place: list[int] = []
    count: dict[str, int] = {}
    for position, op in enumerate(ops):
        before = last_on_lane.get(op.lane)
        clock = {} if before is None else {**result[before], op.lane: place[before]}
        for source in op.deps:
            other = ops[source].lane
            if clock.get(other, -1) >= place[source]:
                continue  # who knows of it knows all that it knew: lanes are in order
            clock[other] = place[source]
            for lane, seen in result[source].items():
                if seen > clock.get(lane, -1):
                    clock[lane] = seen
        result.append(clock)
        place.append(count.get(op.lane, 0))
        count[op.lane] = place[-1] + 1
        last_on_lane[op.lane] = position
    return result
