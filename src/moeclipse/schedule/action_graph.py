"""The graph of a program of whole actions, built by arrays: a million actions take seconds.

Nothing is written down about transfers in such a program; they follow from the placement. Each becomes
one node here (its send and its receive, contracted) on a wire per pair of ranks and direction, in the
order in which the sender produces. This is exactly what `lower` writes into the lists, where the
verifier reads it op by op; a test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.graph import DATA, HOST, LANE, WIRE, Edges, Graph, ImpliedTransfers, sort_graph
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.op import ACTIONS, ActionColumns, Ints, Op, Program

ACTIONS_INSIDE = {kinds.PAIR: 2, kinds.SELF: 1}
OWN_FIELDS = attrgetter("lane", "layer", "step", "chunk", "chunks", "expert", "deps", "comm", "peers")
"""What a whole action leaves at its default: one call for all of them, since there may be a million ops."""
NO_FIELDS = OWN_FIELDS(Op(kind=kinds.F))
LOOKAHEAD = 1
"""A receive is posted this many actions before the one that reads it."""


@dataclass(frozen=True, kw_only=True)
class ActionTable:
    """Leaves of all actions as columns, and where each (stage, microbatch) is computed (-1: nowhere)."""

    program: Program
    rank: Ints
    """Rank of each op."""
    begin: Ints
    """First op of each rank, and the end."""
    owner: Ints
    """The op that holds a leaf."""
    kind: Ints
    """Of a leaf: position in ACTIONS."""
    cell: Ints
    """Of a leaf: stage * num_microbatches + microbatch."""
    forward_at: Ints
    input_grad_at: Ints
    weight_grad_at: Ints

    def of_kind(self, *wanted: Kind) -> tuple[Ints, Ints]:
        """(cells, owners) of all leaves of these kinds."""
        chosen = np.isin(self.kind, [ACTIONS.index(kind) for kind in wanted])
        return self.cell[chosen], self.owner[chosen]

    @property
    def num_ops(self) -> int:
        return len(self.rank)

    def op(self, index: int) -> Op:
        rank = int(self.rank[index])
        return self.program.ranks[rank][index - int(self.begin[rank])]


def holds_its_actions(op: Op) -> bool:
    """A PAIR has two plain actions and a SELF one, which name what they work on; all other ops have none."""
    if not op.parts:
        return op.kind not in ACTIONS_INSIDE
    named = op.stage is not None or op.layer is not None or op.microbatch is not None
    return (
        len(op.parts) == ACTIONS_INSIDE.get(op.kind)
        and not named
        and not any(leaf.parts for leaf in op.parts)
    )


def tabulate(program: Program) -> ActionTable:
    """Columns of an action program; refuses ops that are no actions or name no stage of the placement."""
    shape = program.pipeline()
    if program.num_ranks != shape.num_ranks or shape.copies != 1:
        raise ScheduleError(
            f"{program.name} has lists for {program.num_ranks} ranks, but its placement has "
            f"{shape.placement.num_ranks}, once each in a program of whole actions"
        )
    sizes = np.array(program.sizes, dtype=np.int64)
    rank = np.repeat(np.arange(program.num_ranks), sizes)
    begin = np.concatenate([[0], np.cumsum(sizes)])
    owner, kind, stage, microbatch = _leaves(program)
    stages, M = shape.placement.num_stages, shape.num_microbatches
    table = ActionTable(
        program=program,
        rank=rank,
        begin=begin,
        owner=owner,
        kind=kind,
        cell=stage * M + microbatch,
        forward_at=np.full(stages * M, -1, dtype=np.int64),
        input_grad_at=np.full(stages * M, -1, dtype=np.int64),
        weight_grad_at=np.full(stages * M, -1, dtype=np.int64),
    )
    outside = np.flatnonzero((stage < 0) | (stage >= stages) | (microbatch < 0) | (microbatch >= M))
    if len(outside):
        op = table.op(int(owner[outside[0]]))
        raise ScheduleError(f"{op} lies outside stages 0..{stages - 1} and microbatches 0..{M - 1}")
    for place, makers in (
        (table.forward_at, (kinds.F,)),
        (table.input_grad_at, (kinds.B, kinds.I)),
        (table.weight_grad_at, (kinds.B, kinds.W)),
    ):
        cells, owners = table.of_kind(*makers)
        place[cells] = owners
    return table


def _leaves(program: Program) -> tuple[Ints, Ints, Ints, Ints]:
    """(owner, kind, stage, microbatch) of every leaf."""
    if isinstance(program.ranks, ActionColumns):
        columns = program.ranks
        return (
            np.arange(len(columns.kind)),
            columns.kind.astype(np.int64),
            columns.stage.astype(np.int64),
            columns.microbatch.astype(np.int64),
        )
    owner: list[int] = []
    kind: list[int] = []
    stages: list[int] = []
    microbatches: list[int] = []
    code = {action: index for index, action in enumerate(ACTIONS)}
    for index, op in enumerate(chain.from_iterable(program.ranks)):
        if OWN_FIELDS(op) != NO_FIELDS or (op.parts and not holds_its_actions(op)):
            raise ScheduleError(
                f"{op} is no action; expected F, B, I or W with a stage and a microbatch, a PAIR of two or a "
                "SELF of one, and no deps, group, lane, layer or chunk: transfers follow from the placement"
            )
        for leaf in op.parts or (op,):
            stage, microbatch, what = leaf.stage, leaf.microbatch, code.get(leaf.kind)
            if what is None or stage is None or microbatch is None:
                raise ScheduleError(f"{op} is no action; expected F, B, I or W with a stage and a microbatch")
            owner.append(index)
            kind.append(what)
            stages.append(stage)
            microbatches.append(microbatch)
    lists = (owner, kind, stages, microbatches)
    owners, codes, where, which = (np.array(column, dtype=np.int64) for column in lists)
    return owners, codes, where, which


def action_graph(program: Program, table: ActionTable) -> Graph:
    """The sorted graph; every cell of the table must be filled."""
    ops = table.num_ops
    inside = np.arange(ops - 1)
    inside = inside[table.rank[:-1] == table.rank[1:]]
    pieces: list[tuple[Ints, Ints, int]] = [(inside, inside + 1, LANE)]
    pieces += _local_edges(program, table)
    transfers, transfer_pieces = _transfers(program, table)
    pieces += transfer_pieces

    def name(node: int) -> str:
        if node < ops:
            return f"{table.op(node)} on rank {table.rank[node]}"
        at = node - ops
        kind = kinds.SEND_F if transfers.is_forward[at] else kinds.SEND_B
        return (
            f"{transfers.stage[at]}{kind}{transfers.microbatch[at]} "
            f"(rank {transfers.source[at]} to {transfers.destination[at]})"
        )

    num_nodes = ops + len(transfers.stage)
    return sort_graph(num_nodes, ops, Edges.join(pieces), name, transfers=transfers)


def _crossings(program: Program) -> tuple[Ints, Ints, list[tuple[int, int]]]:
    """Cells that feed another cell: (from, to) forward, and the stage pairs behind them."""
    shape = program.pipeline()
    M = shape.num_microbatches
    before, after, stage_pairs = [], [], []
    for stage in range(shape.placement.num_stages):
        following = shape.placement.next_stage(stage)
        if following is not None:
            microbatches = np.asarray(shape.microbatches_of(stage), dtype=np.int64)
            before.append(stage * M + microbatches)
            after.append(following * M + microbatches)
            stage_pairs.append((stage, following))
    if not before:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, []
    return np.concatenate(before), np.concatenate(after), stage_pairs


def _local_edges(program: Program, table: ActionTable) -> list[tuple[Ints, Ints, int]]:
    """F before its backward, I before its W, and neighbours that live on one rank."""
    rank_of = np.asarray(program.pipeline().placement.rank_of)
    M = program.pipeline().num_microbatches
    filled = np.flatnonzero(table.forward_at >= 0)
    pieces = [(table.forward_at[filled], table.input_grad_at[filled], DATA)]
    split = filled[table.input_grad_at[filled] != table.weight_grad_at[filled]]
    pieces.append((table.input_grad_at[split], table.weight_grad_at[split], DATA))
    before, after, _ = _crossings(program)
    same = rank_of[before // M] == rank_of[after // M]
    pieces.append((table.forward_at[before[same]], table.forward_at[after[same]], DATA))
    pieces.append((table.input_grad_at[after[same]], table.input_grad_at[before[same]], DATA))
    return pieces


def _transfers(program: Program, table: ActionTable) -> tuple[ImpliedTransfers, list[tuple[Ints, Ints, int]]]:
    """One node per transfer between ranks, in wire order, with the edges around it."""
    shape = program.pipeline()
    M = shape.num_microbatches
    rank_of = np.asarray(shape.placement.rank_of)
    before, after, _ = _crossings(program)
    far = rank_of[before // M] != rank_of[after // M]
    before, after = before[far], after[far]
    sender = np.concatenate([before, after])
    reader = np.concatenate([after, before])
    is_forward = np.arange(len(sender)) < len(before)
    producer = np.concatenate([table.forward_at[before], table.input_grad_at[after]])
    consumer = np.concatenate([table.forward_at[after], table.input_grad_at[before]])
    source, destination = rank_of[sender // M], rank_of[reader // M]
    line = source * program.num_ranks + destination
    order = np.lexsort((~is_forward, producer, line))
    producer, consumer, line = producer[order], consumer[order], line[order]
    node = table.num_ops + np.arange(len(order))
    follows = np.flatnonzero(line[:-1] == line[1:])
    pieces: list[tuple[Ints, Ints, int]] = [
        (producer, node, DATA),
        (node, consumer, DATA),
        (node[follows], node[follows + 1], WIRE),
    ]
    # The host posts a receive before LOOKAHEAD actions ahead of its reader, and never after a later one.
    posted = consumer - LOOKAHEAD
    begin = 0
    for end in np.flatnonzero(np.diff(line, append=-1)).tolist():
        segment = slice(begin, end + 1)
        posted[segment] = np.minimum.accumulate(posted[segment][::-1])[::-1]
        begin = end + 1
    blocked = posted - 1 >= table.begin[destination[order]]
    pieces.append((posted[blocked] - 1, node[blocked], HOST))
    transfers = ImpliedTransfers(
        source=source[order],
        destination=destination[order],
        stage=(sender // M)[order],
        microbatch=(sender % M)[order],
        is_forward=is_forward[order],
    )
    return transfers, pieces
