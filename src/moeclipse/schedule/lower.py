"""Lowering: transfers and gradient reductions enter the lists, and every op learns its deps.

A send stands right behind the op that completes what it carries, inside an action if need be, so that
dW left in the action hides it. Receives are posted one action ahead of their reader, and on one wire in
the order of the sends: a receive posted out of order would block the lane for what comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.action_graph import LOOKAHEAD
from moeclipse.schedule.input_travel import with_inputs
from moeclipse.schedule.kinds import COMPUTE, COPIES, DP, ENDS, KIND_OF, LAUNCHES, P2P, Form, Part
from moeclipse.schedule.needs import (
    Key,
    gradient_of,
    keys_of,
    output_of,
    pipeline_sources,
    weight_parts,
)
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import PipelineShape
from moeclipse.schedule.weight_travel import with_weights
from moeclipse.schedule.whole_step import (
    cuts_of_ops,
    numbered,
    shared_communicators,
    with_end,
    with_launches,
)

Message = tuple[Form, int, int]
"""Activations (F) or gradients (B) on their way to a stage: (F or B, that stage, microbatch)."""
FIRST_IN_BACKWARD = (kinds.COMBINE_B, kinds.MLP_B, kinds.SHARED_B)
"""Of a stage's last layer: what reads the gradient that arrives."""


class Block(NamedTuple):
    """The ops of one action; in a serial block each op waits for the one before."""

    ops: list[Op]
    serial: bool = False


def lower(program: Program, *, reduce: bool = False) -> Program:
    """SEND, RECV (and REDUCE behind a stage's last backward) around whole actions."""
    if program.explicit:
        raise ScheduleError(f"{program.name} has been lowered already")
    blocks = [[Block([op]) for op in ops] for ops in program.ranks]
    return lower_blocks(program.name, replace(program.pipeline(), reduce=reduce), blocks)


def lower_blocks(
    name: str,
    shape: PipelineShape,
    blocks: Sequence[Sequence[Block]],
    groups: Mapping[str, tuple[int, ...]] | None = None,
) -> Program:
    """Write transfers between and inside blocks, and resolve deps."""
    transfers = _TransferWriter(shape)
    sent = [[transfers.with_sends(rank, block.ops) for block in row] for rank, row in enumerate(blocks)]
    received = transfers.receives([[_readers(shape, block.ops) for block in row] for row in blocks])
    ranks = []
    cuts = cuts_of_ops([[op for block in row for op in block] for row in sent])
    found: dict[str, tuple[int, ...]] = {}
    for rank, row in enumerate(sent):
        ops: list[Op] = []
        serial: list[bool] = []
        for index, block in enumerate(row):
            posted = received[rank].get(index, [])
            ops += posted + block
            serial += [False] * len(posted) + [blocks[rank][index].serial] * len(block)
        if shape.reduce:
            ops, serial = _with_reductions(shape, rank, ops, serial)
        if shape.step is not None:
            flagged = with_inputs(shape, list(zip(ops, serial, strict=True)))
            flagged = with_launches(shape, flagged, cuts)
            flagged = with_weights(shape, with_end(shape, rank, flagged))
            ops = numbered(shape, rank, [op for op, _ in flagged], found)
            serial = [flag for _, flag in flagged]
        ranks.append(with_deps(shape, ops, _serial_deps(ops, serial)))
    if shape.step is not None:
        members = {**transfers.groups, **found}
        shared = shared_communicators(shape, members)
        return Program(name=name, ranks=tuple(ranks), shape=shape, groups=members, communicators=shared)
    members = {**transfers.groups, **(groups or {})}
    if shape.reduce:
        members |= {f"dp{rank}": (rank,) for rank in range(len(ranks))}
    # A pipeline of one rank has no transfers; a group marks its lists as complete all the same.
    return Program(name=name, ranks=tuple(ranks), shape=shape, groups=members or {"alone": (0,)})


def _serial_deps(ops: Sequence[Op], serial: Sequence[bool]) -> dict[int, int]:
    """Blocking execution: an op waits for the one before it, and every lane for the end of a serial block."""
    chain: dict[int, int] = {}
    last: int | None = None
    last_serial: int | None = None
    waited: set[str] = set()
    for position, op in enumerate(ops):
        if op.kind.lane in (P2P, DP) or op.kind in (*LAUNCHES, *ENDS, *COPIES):
            continue
        if serial[position]:
            if last is not None:
                chain[position] = last
            last_serial = position
            waited = set()
        elif last_serial is not None and op.lane not in waited:
            chain[position] = last_serial
            waited.add(op.lane)
        last = position
    return chain


class _TransferWriter:
    """Sends in the order in which ranks produce them, and the receives that mirror them."""

    def __init__(self, shape: PipelineShape) -> None:
        self.shape = shape
        self.groups: dict[str, tuple[int, ...]] = {}
        self.messages: dict[tuple[int, int], list[Message]] = {}
        """Per (source, destination)."""

    def with_sends(self, rank: int, block: list[Op]) -> list[Op]:
        """The block with each send behind the last op of what it carries."""
        placement = self.shape.placement
        carried = ((Form.F, output_of), (Form.B, gradient_of))
        left: dict[tuple[Form, int, int], set[Key]] = {}
        count: dict[Key, int] = {}
        for op in block:
            for key in keys_of(op):
                count[key] = count.get(key, 0) + 1
        out: list[Op] = []
        for op in block:
            out.append(op)
            for key in keys_of(op):
                count[key] -= 1
                stage, microbatch = key[1], key[3]
                if count[key] or microbatch is None:
                    continue
                for form, made in carried:
                    wanted = made(self.shape, stage, microbatch)
                    if key not in wanted:
                        continue
                    missing = left.setdefault((form, stage, microbatch), set(wanted))
                    missing.discard(key)
                    other = placement.next_stage(stage) if form is Form.F else placement.previous_stage(stage)
                    if not missing and other is not None and placement.rank_of[other] != rank:
                        out.append(self._send(rank, form, stage, other, microbatch))
        return out

    def _send(self, rank: int, form: Form, stage: int, other: int, microbatch: int) -> Op:
        target = self.shape.placement.rank_of[other]
        queue = self.messages.setdefault((rank, target), [])
        queue.append((form, other, microbatch))
        self.groups[f"{rank}>{target}"] = (rank, target)
        return Op(
            kind=KIND_OF[Part.SEND, form],
            lane=f"{P2P}:{rank}>{target}",
            stage=stage,
            microbatch=microbatch,
            comm=(f"{rank}>{target}", len(queue) - 1),
        )

    def receives(self, readers: list[list[set[Message]]]) -> list[dict[int, list[Op]]]:
        """Per rank: the receives to post before each block."""
        result: list[dict[int, list[Op]]] = [{} for _ in readers]
        place: list[dict[Message, int]] = []
        for rank_readers in readers:
            found: dict[Message, int] = {}
            for index, reads in enumerate(rank_readers):
                for message in reads:
                    found.setdefault(message, index)
            place.append(found)
        for (source, target), queue in self.messages.items():
            posts: list[int] = []
            latest = len(readers[target])
            for message in reversed(queue):
                if message not in place[target]:
                    form, stage, microbatch = message
                    what = f"{form.name}{microbatch} to stage {stage}"
                    raise ScheduleError(f"rank {source} sends {what}, which rank {target} never reads")
                latest = min(latest, place[target][message] - LOOKAHEAD)
                posts.append(max(latest, 0))
            for seq, (message, post) in enumerate(zip(queue, reversed(posts), strict=True)):
                form, stage, microbatch = message
                op = Op(
                    kind=KIND_OF[Part.RECV, form],
                    lane=f"{P2P}:{source}>{target}",
                    stage=stage,
                    microbatch=microbatch,
                    comm=(f"{source}>{target}", seq),
                )
                result[target].setdefault(post, []).append(op)
        return result


def _readers(shape: PipelineShape, block: Sequence[Op]) -> set[Message]:
    """What a block would read, if it comes from elsewhere."""
    found: set[Message] = set()
    for op in block:
        for leaf in op.leaves:
            stage, microbatch = leaf.stage, leaf.microbatch
            if stage is None or microbatch is None:
                continue
            if leaf.kind is kinds.F or (leaf.kind is kinds.ATTN_F and leaf.layer == 0):
                found.add((Form.F, stage, microbatch))
            last = leaf.layer is not None and leaf.layer == len(shape.layers[stage]) - 1
            if leaf.kind in (kinds.B, kinds.I) or (last and leaf.kind in FIRST_IN_BACKWARD):
                found.add((Form.B, stage, microbatch))
    return found


def _with_reductions(
    shape: PipelineShape, rank: int, ops: list[Op], serial: list[bool]
) -> tuple[list[Op], list[bool]]:
    """REDUCE behind the op that completes a stage's weight gradients."""
    left: dict[int, int] = {}
    for stage in shape.placement.stages_of(rank):
        parts = sum(len(weight_parts(layer)) for layer in shape.layers[stage]) if shape.layers else 1
        left[stage] = parts * len(shape.microbatches_of(stage))
    out: list[Op] = []
    flags: list[bool] = []
    seq = 0
    for op, flag in zip(ops, serial, strict=True):
        out.append(op)
        flags.append(flag)
        for leaf in op.leaves:
            done = leaf.kind is kinds.B or leaf.kind.form is Form.W
            if done and leaf.stage is not None:
                left[leaf.stage] -= 1
                if not left[leaf.stage]:
                    out.append(Op(kind=kinds.REDUCE, lane=DP, stage=leaf.stage, comm=(f"dp{rank}", seq)))
                    flags.append(False)
                    seq += 1
    return out, flags


def with_deps(shape: PipelineShape, ops: list[Op], chain: Mapping[int, int] | None = None) -> tuple[Op, ...]:
    """Deps point at whatever an op reads, less what compute orders anyway.

    Transfers of one lane are listed, too: they leave in order, but only who waits for one knows that it
    has come.
    """
    out = []
    for position, (op, sources) in enumerate(zip(ops, pipeline_sources(shape, ops), strict=True)):
        if chain and position in chain:
            sources.append(chain[position])
        deps = {source for source in sources if ops[source].lane != op.lane or op.lane != COMPUTE}
        out.append(op._replace(deps=tuple(sorted(deps))) if deps else op)
    return tuple(out)
