"""Templates: the order in which the layer ops of an action are launched.

A template is only an order; what each op needs comes from `needs`. An exchange is always launched as soon
as what it carries has been launched, and in front of the compute that hides it, so the same list overlaps
on streams and where compute runs inline on the host.

    serial   each op waits for the one before: the order everyone starts from
    self F   ATTN ROUTE dispatch> SHARED MLP combine>          shared experts hide dispatch
    self B   combine> SHARED MLP dispatch> dW(MLP) dW(SHARED) ROUTE ATTN  next combine> dW(ATTN)
                                                               dW hides dispatch, and the next combine
    pair     ATTN of F, SHARED of B   over combine of B
             MLP of B                 over dispatch of F
             dW(MLP) of B, MLP of F   over dispatch of B
             ATTN of B, dW of SHARED and ATTN  over combine of F, the next combine of B, and transfers
             the model's HEAD stands at both ends: its dW hides the first combine of B

Row chunks hide what remains of an action alone: with `split = "moe"` the routed rows are cut, with
`split = "layer"` attention is cut too (by sequences), so that the last combine of one layer runs under the
attention of the next. With recompute, those parts stand where backward would wait for combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import A2A, KIND_OF, P2P, TRANSFERS, Form, Kind, Part
from moeclipse.schedule.launch import StepShape
from moeclipse.schedule.lower import Block, lower_blocks
from moeclipse.schedule.memory import layer_memory
from moeclipse.schedule.needs import weight_parts
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import LayerShape, PipelineShape
from moeclipse.schedule.whole_step import numbered, shared_communicators

Overlap = Literal["off", "pair", "pair+self"]
ROUTED = (Part.DISPATCH, Part.MLP, Part.COMBINE)
"""Parts that see routed rows."""


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """How actions become layer ops."""

    overlap: Overlap = "pair+self"
    """off: everything serial; pair: only PAIRs (and SELFs) overlap; pair+self: all actions do."""
    chunks: int = 1
    split: Literal["moe", "layer"] = "moe"

    def __post_init__(self) -> None:
        if self.overlap not in ("off", "pair", "pair+self"):
            raise ScheduleError(f"overlap ({self.overlap!r}) must be 'off', 'pair' or 'pair+self'")
        if self.split not in ("moe", "layer") or self.chunks < 1:
            raise ScheduleError(
                f"split ({self.split!r}) must be 'moe' or 'layer', and chunks ({self.chunks}) at least 1"
            )


def expand(
    program: Program,
    layers: Sequence[LayerShape] | Sequence[Sequence[LayerShape]],
    expansion: Expansion | None = None,
    *,
    reduce: bool = False,
    step: StepShape | None = None,
) -> Program:
    """The program at layer level. `layers` is one stage's list (for all stages), or one list per stage.

    `step`: with everything else that travels, and the end of the step.
    """
    shape = program.pipeline()
    if program.explicit:
        raise ScheduleError(f"{program.name} has been lowered already; expand whole actions instead")
    how = expansion or Expansion()
    stages = shape.placement.num_stages
    per_stage = _per_stage(layers, stages)
    shape = replace(shape, layers=per_stage, reduce=reduce, step=step)
    blocks = []
    for rank, ops in enumerate(program.ranks):
        seq = 0
        row = []
        for op in ops:
            block = _expand_action(op, shape, how)
            numbered = []
            for layer_op in block.ops:
                if layer_op.lane == A2A:
                    layer_op = layer_op._replace(comm=(f"ep{rank}", seq))
                    seq += 1
                numbered.append(layer_op)
            row.append(Block(numbered, block.serial))
        blocks.append(row)
    groups = {f"ep{rank}": (rank,) for rank in range(program.num_ranks)}
    return lower_blocks(f"{program.name} {how.overlap}", shape, blocks, groups)


def _per_stage(
    layers: Sequence[LayerShape] | Sequence[Sequence[LayerShape]], stages: int
) -> tuple[tuple[LayerShape, ...], ...]:
    if not layers:
        raise ScheduleError("a stage needs at least one layer, but layers is empty")
    if isinstance(layers[0], LayerShape):
        return (tuple(layer for layer in layers if isinstance(layer, LayerShape)),) * stages
    listed = tuple(tuple(stage) for stage in layers if not isinstance(stage, LayerShape))
    if len(listed) != stages or not all(listed):
        raise ScheduleError(
            f"layers must list at least one layer for each of the {stages} stages, but has "
            f"{[len(stage) for stage in listed]}"
        )
    return listed


def _expand_action(action: Op, shape: PipelineShape, how: Expansion) -> Block:
    alone = action.parts[0] if action.kind is kinds.SELF else action
    if action.kind is kinds.PAIR:
        f, b = (_OpMaker(leaf, shape, 1) for leaf in action.parts)
        if how.overlap == "off":
            return Block([*serial_forward(f), *serial_backward(b)], serial=True)
        return Block(list(paired(f, b)))
    overlapped = how.overlap == "pair+self" or (how.overlap == "pair" and action.kind is kinds.SELF)
    make = _OpMaker(alone, shape, how.chunks if overlapped else 1, how.split)
    if alone.kind is kinds.W:
        return Block(list(all_weight_grads(make)))
    if alone.kind is kinds.F:
        order = self_forward(make) if overlapped else serial_forward(make)
    else:
        order = self_backward(make) if overlapped else serial_backward(make)
    return Block(list(order), serial=not overlapped)


class _OpMaker:
    """One microbatch's pass through one stage: makes its ops."""

    def __init__(self, action: Op, shape: PipelineShape, chunks: int, split: str = "moe") -> None:
        assert action.stage is not None
        self.stage, self.microbatch = action.stage, action.microbatch
        self.layers = shape.layers[action.stage]
        self.with_weights = action.kind is kinds.B
        self.chunks, self.split = chunks, split

    def cuts(self, kind: Kind) -> int:
        """In how many chunks an op is launched."""
        if self.chunks == 1 or kind.form is Form.W:
            return 1
        whole_layer = self.split == "layer" and kind.form is not Form.R
        return self.chunks if whole_layer or kind.part in ROUTED else 1

    def ops(self, index: int, kind: Kind, chunk: int | None = None) -> Iterator[Op]:
        """The op `kind` of layer `index` (one chunk of it, or all), if the layer has that part."""
        layer = self.layers[index]
        if kind.part not in (layer.recomputed if kind.form is Form.R else layer.parts):
            return
        if kind.form is Form.W and not self.with_weights:
            return
        cuts = self.cuts(kind) if layer.moe else 1
        if cuts == 1:
            if chunk in (None, 0):
                yield self._op(index, layer, kind)
            return
        for at in range(cuts) if chunk is None else (chunk,):
            yield self._op(index, layer, kind, at, cuts)

    def _op(self, index: int, layer: LayerShape, kind: Kind, chunk: int | None = None, chunks: int = 1) -> Op:
        alloc, free = layer_memory(layer, kind)
        return Op(
            kind=kind,
            lane=kind.lane,
            stage=self.stage,
            layer=index,
            microbatch=self.microbatch,
            chunk=chunk,
            chunks=chunks,
            alloc=alloc / chunks,
            free=free / chunks,
        )

    def each(self, index: int, *wanted: Kind) -> Iterator[Op]:
        for kind in wanted:
            yield from self.ops(index, kind)

    def by_chunk(self, index: int, *wanted: Kind) -> Iterator[Op]:
        """All kinds of chunk 0, then all kinds of chunk 1, ...; parts that are not cut go with chunk 0."""
        for chunk in range(self.chunks):
            for kind in wanted:
                yield from self.ops(index, kind, chunk)


def serial_forward(f: _OpMaker) -> Iterator[Op]:
    for index, layer in enumerate(f.layers):
        yield from f.each(index, *(KIND_OF[part, Form.F] for part in layer.parts))


def serial_backward(b: _OpMaker) -> Iterator[Op]:
    """Weight gradients follow their input gradients at once."""
    for index in reversed(range(len(b.layers))):
        layer = b.layers[index]
        yield from b.each(index, *(KIND_OF[part, Form.R] for part in layer.recomputed))
        for part in reversed(layer.parts):
            yield from b.each(index, KIND_OF[part, Form.B])
            if part in weight_parts(layer):
                yield from b.each(index, KIND_OF[part, Form.W])


def all_weight_grads(w: _OpMaker) -> Iterator[Op]:
    w.with_weights = True
    for index in reversed(range(len(w.layers))):
        yield from w.each(index, *(KIND_OF[part, Form.W] for part in weight_parts(w.layers[index])))


def self_forward(f: _OpMaker) -> Iterator[Op]:
    for index in range(len(f.layers)):
        if f.chunks > 1 and f.split == "layer":
            # ROUTE exchanges sizes, which wait on the wire behind the last combine: give that time to end.
            yield from f.by_chunk(index, kinds.ATTN_F, kinds.SHARED_F, kinds.ROUTE_F, kinds.DISPATCH_F)
        else:
            yield from f.by_chunk(index, kinds.ATTN_F, kinds.ROUTE_F, kinds.DISPATCH_F)
            yield from f.each(index, kinds.SHARED_F)
        yield from f.by_chunk(index, kinds.MLP_F, kinds.COMBINE_F)
    yield from f.each(len(f.layers) - 1, kinds.HEAD_F)


def self_backward(b: _OpMaker) -> Iterator[Op]:
    last = len(b.layers) - 1
    yield from b.by_chunk(last, kinds.HEAD_B, kinds.COMBINE_B)
    yield from b.each(last, kinds.HEAD_W)
    for index in range(last, -1, -1):
        yield from b.each(
            index, kinds.ATTN_R, kinds.ROUTE_R, kinds.DISPATCH_R, kinds.SHARED_R, kinds.SHARED_B, kinds.MLP_R
        )
        yield from b.by_chunk(index, kinds.MLP_B, kinds.DISPATCH_B)
        yield from b.each(index, kinds.MLP_W, kinds.SHARED_W)
        for chunk in range(b.chunks):
            for kind in (kinds.ROUTE_B, kinds.ATTN_B):
                yield from b.ops(index, kind, chunk)
            if index and b.split == "layer":
                yield from b.ops(index - 1, kinds.COMBINE_B, chunk)
        if index and b.split != "layer":
            yield from b.each(index - 1, kinds.COMBINE_B)
        yield from b.each(index, kinds.ROUTE_W, kinds.ATTN_W)


def paired(f: _OpMaker, b: _OpMaker) -> Iterator[Op]:
    """Layer i of F beside layer L-1-i of B; what one side has more runs alone at the end."""
    last = len(b.layers) - 1
    yield from b.each(last, kinds.HEAD_B, kinds.COMBINE_B, kinds.HEAD_W)
    for index in range(max(len(f.layers), len(b.layers))):
        front = index if index < len(f.layers) else None
        back = last - index if index <= last else None
        if back is not None:
            yield from b.each(back, kinds.ATTN_R, kinds.ROUTE_R, kinds.DISPATCH_R, kinds.SHARED_R)
        if front is not None:
            yield from f.each(front, kinds.ATTN_F)
        if back is not None:
            yield from b.each(back, kinds.SHARED_B)
        if front is not None:
            yield from f.each(front, kinds.ROUTE_F, kinds.DISPATCH_F)
        if back is not None:
            yield from b.each(back, kinds.MLP_R, kinds.MLP_B, kinds.DISPATCH_B, kinds.MLP_W)
        if front is not None:
            yield from f.each(front, kinds.SHARED_F, kinds.MLP_F, kinds.COMBINE_F)
        if back is not None:
            yield from b.each(back, kinds.ROUTE_B, kinds.ATTN_B)
            if back:
                yield from b.each(back - 1, kinds.COMBINE_B)
            yield from b.each(back, kinds.SHARED_W, kinds.ROUTE_W, kinds.ATTN_W)
    yield from f.each(len(f.layers) - 1, kinds.HEAD_F)


def replicate(program: Program, copies: int | None = None) -> Program:
    """Every rank becomes `copies` ranks that run the same list and share its expert group.

    A whole step knows its copies, and who of them meets whom.
    """
    shape = program.pipeline()
    copies = copies or (shape.step.copies if shape.step is not None else 1)
    if not program.explicit or shape.copies != 1 or copies < 1:
        raise ScheduleError("replicate needs an expanded program of single ranks, and copies of at least 1")
    if shape.step is not None:
        return _replicate_whole(program, replace(shape, copies=copies))
    groups: dict[str, tuple[int, ...]] = {}
    renamed: dict[tuple[str, int], str] = {}
    for group, members in program.groups.items():
        for copy in range(copies):
            if len(members) == 2:
                ends = tuple(rank * copies + copy for rank in members)
                renamed[group, copy] = f"{ends[0]}>{ends[1]}"
                groups[renamed[group, copy]] = ends
            else:
                renamed[group, copy] = group
                groups[group] = tuple(members[0] * copies + other for other in range(copies))
    ranks = []
    for ops in program.ranks:
        for copy in range(copies):
            ranks.append(tuple(_renamed(op, copy, renamed) for op in ops))
    return replace(program, ranks=tuple(ranks), groups=groups, shape=replace(shape, copies=copies))


def _replicate_whole(program: Program, shape: PipelineShape) -> Program:
    """Every copy meets others on axes of its own, and the same copy of other stages."""
    if shape.step is None or shape.copies != shape.step.copies:
        raise ScheduleError(f"a whole step has {shape.step and shape.step.copies} copies, not {shape.copies}")
    groups: dict[str, tuple[int, ...]] = {}
    ranks: list[tuple[Op, ...]] = []
    for ops in program.ranks:
        for copy in range(shape.copies):
            mine = []
            for op in ops:
                if op.kind in TRANSFERS and op.comm is not None:
                    ends = tuple(rank * shape.copies + copy for rank in program.groups[op.comm[0]])
                    wire = f"{ends[0]}>{ends[1]}"
                    groups[wire] = ends
                    op = op._replace(comm=(wire, op.comm[1]), lane=f"{P2P}:{wire}")
                mine.append(op)
            ranks.append(tuple(numbered(shape, len(ranks), mine, groups)))
    shared = shared_communicators(shape, groups)
    return replace(program, ranks=tuple(ranks), groups=groups, shape=shape, communicators=shared)


def _renamed(op: Op, copy: int, names: dict[tuple[str, int], str]) -> Op:
    if op.comm is None:
        return op
    group = names[op.comm[0], copy]
    lane = f"{P2P}:{group}" if op.kind in TRANSFERS else op.lane
    return op._replace(comm=(group, op.comm[1]), lane=lane)
