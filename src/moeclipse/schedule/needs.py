"""What each op of a pipeline reads, as names of the ops that make it.

One table for both levels: templates turn it into `deps`, the verifier demands that every entry has
ended before the reader starts. A key is (kind, stage, layer, microbatch); B and I both answer to "B"
(the gradient of the input), B and W both to "W".

    forward   ATTN <- layer before     ROUTE, SHARED <- ATTN     DISPATCH <- ROUTE
              MLP <- DISPATCH          COMBINE <- MLP            layer = COMBINE + SHARED
    backward  COMBINE, SHARED <- layer behind   MLP <- COMBINE   DISPATCH <- MLP
              ROUTE <- DISPATCH        ATTN <- ROUTE + SHARED    W of a part <- B of the part

The model's HEAD, where there is one, is the last part of the last layer, and the first in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import LayerShape, PipelineShape

Key = tuple[str, int, int | None, int | None]
KeyTable = dict[Key, list[tuple[int, int | None, int]]]
"""Positions in one rank's list by key, each with its chunk and the number of chunks."""


def keys_of(op: Op) -> Sequence[Key]:
    """The names an op answers to."""
    if not op.parts and op.kind not in ("B", "I"):
        return ((op.kind, -1 if op.stage is None else op.stage, op.layer, op.microbatch),)
    return [
        (kind, -1 if leaf.stage is None else leaf.stage, leaf.layer, leaf.microbatch)
        for leaf in op.leaves
        for kind in {"B": ("B", "W"), "I": ("B",)}.get(leaf.kind, (leaf.kind,))
    ]


def output_of(shape: PipelineShape, stage: int, microbatch: int) -> list[Key]:
    """What a stage hands to the next one."""
    if not shape.layers:
        return [("F", stage, None, microbatch)]
    last = len(shape.layers[stage]) - 1
    return _layer_output(shape.layers[stage][last], stage, last, microbatch)


def gradient_of(shape: PipelineShape, stage: int, microbatch: int) -> list[Key]:
    """What a stage hands back to the one before."""
    return [("B", stage, None, microbatch)] if not shape.layers else [("ATTN_B", stage, 0, microbatch)]


def needs(shape: PipelineShape, op: Op) -> list[Key]:
    """Everything that must have ended before `op` starts."""
    if not op.parts:
        return _leaf_needs(shape, op)
    return [key for leaf in op.parts for key in _leaf_needs(shape, leaf)]


def _leaf_needs(shape: PipelineShape, op: Op) -> list[Key]:
    stage = -1 if op.stage is None else op.stage
    if op.kind == "REDUCE":
        if not shape.layers:
            return [("W", stage, None, m) for m in shape.microbatches_of(stage)]
        return [
            (f"{part}_W", stage, index, m)
            for m in shape.microbatches_of(stage)
            for index, layer in enumerate(shape.layers[stage])
            for part in weight_parts(layer)
        ]
    if op.microbatch is None:
        return []
    m = op.microbatch
    if op.kind == "F":
        return _input_of(shape, stage, m)
    if op.kind in ("B", "I"):
        return [("F", stage, None, m), *_gradient_into(shape, stage, m)]
    if op.kind == "W":
        return [("B", stage, None, m)]
    if op.kind == "SEND_F":
        return output_of(shape, stage, m)
    if op.kind == "SEND_B":
        return gradient_of(shape, stage, m)
    if op.layer is None:
        return []
    part, form = op.kind.rsplit("_", 1)
    layer = shape.layers[stage][op.layer]
    if form == "F":
        return _forward_needs(shape, layer, part, stage, op.layer, m)
    if form == "B":
        return _backward_needs(shape, layer, part, stage, op.layer, m)
    if form == "R":
        return _recompute_needs(layer, part, stage, op.layer, m)
    return [(f"{part}_B", stage, op.layer, m)]


def weight_parts(layer: LayerShape) -> list[str]:
    """Parts with parameters, in the order in which backward reaches them."""
    return [part for part in reversed(layer.parts) if part not in ("DISPATCH", "COMBINE")]


def _input_of(shape: PipelineShape, stage: int, m: int) -> list[Key]:
    before = shape.placement.previous_stage(stage)
    if before is None:
        return []
    if shape.placement.rank_of[before] == shape.placement.rank_of[stage]:
        return output_of(shape, before, m)
    return [("RECV_F", stage, None, m)]


def _gradient_into(shape: PipelineShape, stage: int, m: int) -> list[Key]:
    behind = shape.placement.next_stage(stage)
    if behind is None:
        return output_of(shape, stage, m)  # the loss
    if shape.placement.rank_of[behind] == shape.placement.rank_of[stage]:
        return gradient_of(shape, behind, m)
    return [("RECV_B", stage, None, m)]


def _layer_output(layer: LayerShape, stage: int, index: int, m: int) -> list[Key]:
    return [("HEAD_F", stage, index, m)] if layer.head else _body_output(layer, stage, index, m)


def _body_output(layer: LayerShape, stage: int, index: int, m: int) -> list[Key]:
    """What the head reads."""
    if not layer.moe:
        return [("MLP_F", stage, index, m)]
    shared: list[Key] = [("SHARED_F", stage, index, m)] if layer.shared else []
    return [("COMBINE_F", stage, index, m), *shared]


def _forward_needs(
    shape: PipelineShape, layer: LayerShape, part: str, stage: int, index: int, m: int
) -> list[Key]:
    if part == "ATTN":
        if index == 0:
            return _input_of(shape, stage, m)
        return _layer_output(shape.layers[stage][index - 1], stage, index - 1, m)
    if part == "HEAD":
        return _body_output(layer, stage, index, m)
    source = {"ROUTE": "ATTN", "SHARED": "ATTN", "DISPATCH": "ROUTE", "COMBINE": "MLP"}.get(part)
    if part == "MLP":
        source = "DISPATCH" if layer.moe else "ATTN"
    return [(f"{source}_F", stage, index, m)]


def _backward_needs(
    shape: PipelineShape, layer: LayerShape, part: str, stage: int, index: int, m: int
) -> list[Key]:
    saved: list[Key] = []
    if part in layer.recomputed:
        saved = [(f"{part}_R", stage, index, m)]
    elif part not in ("DISPATCH", "COMBINE"):
        saved = [(f"{part}_F", stage, index, m)]
    if part == "HEAD":
        return [*saved, *_gradient_into(shape, stage, m)]
    if part in ("COMBINE", "SHARED") or (part == "MLP" and not layer.moe):
        if layer.head:
            return [*saved, ("HEAD_B", stage, index, m)]
        if index + 1 < len(shape.layers[stage]):
            return [*saved, ("ATTN_B", stage, index + 1, m)]
        return [*saved, *_gradient_into(shape, stage, m)]
    if part == "ATTN":
        sources = ["ROUTE", "SHARED"] if layer.moe and layer.shared else ["ROUTE" if layer.moe else "MLP"]
    else:
        sources = [{"MLP": "COMBINE", "DISPATCH": "MLP", "ROUTE": "DISPATCH"}[part]]
    return [*saved, *[(f"{source}_B", stage, index, m) for source in sources]]


def _recompute_needs(layer: LayerShape, part: str, stage: int, index: int, m: int) -> list[Key]:
    if part == "ATTN":
        return [("ATTN_F", stage, index, m)]
    source = "ATTN" if part in ("ROUTE", "SHARED") or not layer.moe else "ROUTE"
    if part == "MLP" and layer.moe:
        source = "DISPATCH"
    form = "R" if source in layer.recomputed else "F"
    return [(f"{source}_{form}", stage, index, m)]


def tabulate_keys(ops: Sequence[Op]) -> KeyTable:
    table: KeyTable = {}
    for position, op in enumerate(ops):
        for key in keys_of(op):
            table.setdefault(key, []).append((position, op.chunk, op.chunks))
    return table


def resolve(shape: PipelineShape, op: Op, table: KeyTable) -> list[int]:
    """Positions of what `op` reads on its rank; equal cuts match chunk by chunk, others need all."""
    found = []
    for key in needs(shape, op):
        if key not in table:
            raise ScheduleError(
                f"{op} reads {key[0]} of stage {key[1]}, microbatch {key[3]}, which its rank never launches"
            )
        for position, chunk, chunks in table[key]:
            if op.chunk is None or chunk is None or chunks != op.chunks or chunk == op.chunk:
                found.append(position)
    return found
