"""The CSV form of torch.distributed.pipelining, read and written.

One row per rank, one cell per action: `2F0`, `3SEND_F1`, `(0F7;7B3)OVERLAP_F_B`, empty for a slot in which
the rank idles. A file with communication (`compute_comms`) also names UNSHARD, RESHARD and REDUCE_GRAD.

What the form cannot say: two stages with one index on different ranks, so DualPipe is refused; layer
ops; and self-overlap, which is written as the plain action.
Hazard: such a file does not say which communicator a transfer uses. It is read as ours: one wire per
direction between two ranks, in the order of the row.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import islice

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import DP, P2P, TRANSFERS, Part
from moeclipse.schedule.lower import with_deps
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import PipelineShape, StagePlacement
from moeclipse.schedule.text import parse_op

PAIR_NAME = "OVERLAP_F_B"
REDUCE_NAME = "REDUCE_GRAD"


def format_csv(program: Program) -> str:
    """Rows of cells, as torch writes them."""
    shape = program.pipeline()
    if shape.placement.num_chains > 1:
        raise ScheduleError(f"{program.name} runs two directions, which this CSV form cannot express")
    if shape.layers:
        raise ScheduleError(f"{program.name} has layer ops; write the CSV before expanding it")
    out = io.StringIO()
    writer = csv.writer(out)
    for ops in program.ranks:
        writer.writerow([_cell(op) for op in ops])
    return out.getvalue()


def _cell(op: Op) -> str:
    if op.kind is kinds.PAIR:
        return f"{op}{PAIR_NAME}"
    if op.kind is kinds.SELF:
        return str(op.parts[0])
    return str(op).replace(kinds.REDUCE.name, REDUCE_NAME)


def parse_csv(text: str, name: str = "csv") -> Program:
    """A program; the placement follows from which rank computes which stage."""
    try:
        cells = [[cell for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise ScheduleError(f"{name} is not CSV: {error}") from None
    try:
        rows = [[_parse_cell(cell) for cell in row] for row in cells]
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
    rank_of: dict[int, int] = {}
    microbatches = set()
    for rank, row in enumerate(rows):
        for op in row:
            for leaf in op.leaves:
                if leaf.stage is None:
                    raise ScheduleError(f"{name}: {op} on rank {rank} names no stage")
                if rank_of.setdefault(leaf.stage, rank) != rank:
                    raise ScheduleError(
                        f"{name}: stage {leaf.stage} appears on ranks {rank_of[leaf.stage]} and {rank}; "
                        "a stage lives on one rank"
                    )
                if leaf.microbatch is not None:
                    microbatches.add(leaf.microbatch)
    if not rank_of:
        raise ScheduleError(f"{name}: no actions found")
    if len(rank_of) <= max(rank_of):  # a number may be absurd: nothing is counted up to it
        missing = list(islice((stage for stage in range(max(rank_of)) if stage not in rank_of), 3))
        raise ScheduleError(f"{name}: stages {missing} appear on no rank")
    if len(microbatches) <= max(microbatches, default=-1):
        absent = next(m for m in range(max(microbatches)) if m not in microbatches)
        raise ScheduleError(f"{name}: microbatch {absent} appears in no action")
    placement = StagePlacement(num_ranks=len(rows), rank_of=tuple(rank_of[s] for s in range(len(rank_of))))
    found = {op.kind for row in rows for op in row}
    shape = PipelineShape(
        placement=placement, num_microbatches=max(microbatches, default=-1) + 1, reduce=kinds.REDUCE in found
    )
    if not found & {*TRANSFERS, kinds.REDUCE, kinds.UNSHARD, kinds.RESHARD}:
        return Program(name=name, ranks=tuple(map(tuple, rows)), shape=shape)
    return _with_communication(name, shape, rows)


def _parse_cell(cell: str) -> Op:
    text = cell.strip()
    if text.endswith(PAIR_NAME):
        op = parse_op(text[: -len(PAIR_NAME)])
        if op.kind is not kinds.PAIR:
            raise ScheduleError(f"{cell!r} must hold two actions")
        return op
    return parse_op(text.replace(REDUCE_NAME, kinds.REDUCE.name))


def _with_communication(name: str, shape: PipelineShape, rows: Iterable[list[Op]]) -> Program:
    groups: dict[str, tuple[int, ...]] = {}
    ranks = []
    for rank, row in enumerate(rows):
        seq: dict[str, int] = {}
        ops = []
        for op in row:
            group, lane = "", op.lane
            if op.kind in TRANSFERS:
                group = _wire(shape.placement, op)
                groups[group] = tuple(int(end) for end in group.split(">"))
                lane = f"{P2P}:{group}"
            elif op.lane == DP:
                group = f"dp{rank}"
                groups[group] = (rank,)
            if group:
                op = op._replace(lane=lane, comm=(group, seq.get(group, 0)))
                seq[group] = seq.get(group, 0) + 1
            ops.append(op)
        ranks.append(with_deps(shape, ops))
    return Program(name=name, ranks=tuple(ranks), shape=shape, groups=groups or {"alone": (0,)})


def _wire(placement: StagePlacement, op: Op) -> str:
    assert op.stage is not None
    towards_next = op.kind in (kinds.SEND_F, kinds.RECV_B)
    other = placement.next_stage(op.stage) if towards_next else placement.previous_stage(op.stage)
    if other is None:
        raise ScheduleError(f"{op} has nobody on the other side: stage {op.stage} is at the end of the model")
    ends = (placement.rank_of[op.stage], placement.rank_of[other])
    source, target = ends if op.kind.part is Part.SEND else ends[::-1]
    return f"{source}>{target}"
