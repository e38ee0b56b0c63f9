"""What each op of a pipeline reads, as names of the ops that make it.

One table for both levels: templates turn it into `deps`, the verifier demands that every entry has
ended before the reader starts. A key is (kind, stage, layer, microbatch); B and I both answer to B
(the gradient of the input), B and W both to W. What an op launches while it runs, and buckets, have a number
as well; whoever reads an op reads what it launches, too, but for the loads, which ROUTE wants in backward.

    forward   ATTN <- layer before     ROUTE, SHARED <- ATTN     DISPATCH <- ROUTE
              MLP <- DISPATCH          COMBINE <- MLP            layer = COMBINE + SHARED
    backward  COMBINE, SHARED <- layer behind   MLP <- COMBINE   DISPATCH <- MLP
              ROUTE <- DISPATCH        ATTN <- ROUTE + SHARED    W of a part <- B of the part

The input of a layer that lies on the host meanwhile: STORE <- ATTN, FETCH <- STORE, recompute <- FETCH
(`schedule/input_travel`). The model's HEAD, where there is one, is the last part of the last layer, and the
first in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.grad_travel import leaves, left_before
from moeclipse.schedule.input_travel import buffer_sources
from moeclipse.schedule.kinds import AWAITED, COMPUTE, ENDS, KIND_OF, LAUNCHES, Form, Kind, Part
from moeclipse.schedule.launch import StepShape
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import LayerShape, PipelineShape
from moeclipse.schedule.state_travel import fetched_ahead, in_the_buffer_before, updated_with
from moeclipse.schedule.weight_travel import weight_sources
from moeclipse.schedule.whole_step import buckets_of, ends_at, hosted_by, hosted_launch, layer_of

Key = tuple[Kind, int, int | None, int | None] | tuple[Kind, int, int | None, int | None, int | None]
KeyTable = dict[Key, list[tuple[int, int | None, int]]]
"""Positions in one rank's list by key, each with its chunk and the number of chunks."""

ANSWERS: dict[Kind, tuple[Kind, ...]] = {kinds.B: (kinds.B, kinds.W), kinds.I: (kinds.B,)}
INPUT_OF: dict[Part, Part] = {
    Part.ROUTE: Part.ATTN,
    Part.SHARED: Part.ATTN,
    Part.DISPATCH: Part.ROUTE,
    Part.MLP: Part.DISPATCH,
    Part.COMBINE: Part.MLP,
}
"""Which part of a MoE layer a part reads in forward; in a dense one MLP reads ATTN."""
GRADIENTS_OF: dict[Kind, tuple[Kind, ...]] = {
    kinds.MLP_B: (kinds.COMBINE_B,),
    kinds.DISPATCH_B: (kinds.MLP_B,),
    kinds.ROUTE_B: (kinds.DISPATCH_B,),
    kinds.ATTN_B: (kinds.ROUTE_B, kinds.SHARED_B),
}
"""What a part inside of a MoE layer reads in backward; in a dense one ATTN reads MLP."""
EXCHANGES = (Part.DISPATCH, Part.COMBINE)
SOURCE_IN_EXCHANGE: dict[Kind, Kind] = {
    kinds.C_F: kinds.S_F,
    kinds.R_F: kinds.C_F,
    kinds.C_B: kinds.S_B,
    kinds.R_B: kinds.C_B,
    kinds.SHADOW_F: kinds.SHADOW_SEND,
    kinds.SHADOW_W: kinds.SHADOW_B,
    kinds.SHADOW_REDUCE: kinds.SHADOW_W,
    kinds.SHADOW_ADD: kinds.SHADOW_REDUCE,
}
"""In the exchange of a layer: what an op reads of the same step, chunk and expert."""


def keys_of(op: Op) -> Sequence[Key]:
    """The names an op answers to."""
    if op.step is not None:
        return ((op.kind, -1 if op.stage is None else op.stage, op.layer, op.microbatch, op.step),)
    if not op.parts and op.kind not in ANSWERS:
        return ((op.kind, -1 if op.stage is None else op.stage, op.layer, op.microbatch),)
    return [
        (kind, -1 if leaf.stage is None else leaf.stage, leaf.layer, leaf.microbatch)
        for leaf in op.leaves
        for kind in ANSWERS.get(leaf.kind, (leaf.kind,))
    ]


def output_of(shape: PipelineShape, stage: int, microbatch: int) -> list[Key]:
    """What a stage hands to the next one."""
    if not shape.layers:
        return [(kinds.F, stage, None, microbatch)]
    last = len(shape.layers[stage]) - 1
    return _layer_output(shape.layers[stage][last], stage, last, microbatch)


def gradient_of(shape: PipelineShape, stage: int, microbatch: int) -> list[Key]:
    """What a stage hands back to the one before."""
    if not shape.layers:
        return [(kinds.B, stage, None, microbatch)]
    return [(kinds.ATTN_B, stage, 0, microbatch)]


def weight_parts(layer: LayerShape) -> list[Part]:
    """Parts with parameters, in the order in which backward reaches them."""
    return [part for part in reversed(layer.parts) if part not in EXCHANGES]


def needs(shape: PipelineShape, op: Op) -> list[Key]:
    """Everything that must have ended before `op` starts."""
    if shape.step is not None:
        return _whole_needs(shape, shape.step, op)
    if not op.parts:
        return _leaf_needs(shape, op)
    return [key for leaf in op.parts for key in _leaf_needs(shape, leaf)]


def _whole_needs(shape: PipelineShape, step: StepShape, op: Op) -> list[Key]:
    """The same where a program holds all that travels."""
    if op.kind in ENDS:
        return _end_needs(shape, step, op)
    if op.kind in LAUNCHES:
        return _launch_needs(shape, op)
    own = [
        _launch_key(shape, op, launch.kind, number)
        for number, launch in hosted_by(shape, op)
        if launch.ahead and launch.kind in AWAITED
    ]
    updated = _updated(shape, step, op) if step.next_forward and op.kind is kinds.ATTN_F else []
    if op.stage is not None and op.layer is not None:
        place = min(shape.placement.stages_of(shape.placement.rank_of[op.stage]))
        gone = left_before(buckets_of(shape, step, op.stage), op)
        updated += [(kinds.GRAD_STORE, place, None, None, number) for number in gone]
    return own + updated + _with_launches(shape, _leaf_needs(shape, op))


def _updated(shape: PipelineShape, step: StepShape, op: Op) -> list[Key]:
    """The updates of the weights that a layer's forward reads; its other parts come behind this one."""
    assert op.stage is not None
    first = min(shape.placement.stages_of(shape.placement.rank_of[op.stage]))
    read = [(op.stage, op.layer) in bucket.places for bucket in buckets_of(shape, step, op.stage)]
    return [(kinds.BUCKET_UPDATE, first, None, None, number) for number, here in enumerate(read) if here]


def _launch_key(shape: PipelineShape, host: Op, kind: Kind, number: int) -> Key:
    return (kind, -1 if host.stage is None else host.stage, layer_of(shape, host), host.microbatch, number)


def _with_launches(shape: PipelineShape, keys: list[Key]) -> list[Key]:
    found = list(keys)
    for kind, stage, layer, m, *_ in keys:
        host = Op(kind=kind, stage=stage, layer=layer, microbatch=m)
        found += [
            _launch_key(shape, host, launch.kind, number)
            for number, launch in hosted_by(shape, host)
            if launch.kind is not kinds.LOADS_F or kind is kinds.LOADS_F
        ]
        if kind is kinds.DISPATCH_B and layer is not None:  # who reads it is ROUTE, which wants loads, too
            found += [
                (kinds.LOADS_F, stage, layer, m, number)
                for number, launch in enumerate(shape.layers[stage][layer].launches)
                if launch.kind is kinds.LOADS_F
            ]
    return found


def _launch_needs(shape: PipelineShape, op: Op) -> list[Key]:
    assert op.step is not None
    launch = hosted_launch(shape, op)
    sends = launch.host is kinds.SEND_F
    host = op._replace(kind=launch.host, step=None, layer=None if sends else op.layer)
    earlier = [
        _launch_key(shape, host, other.kind, number)
        for number, other in hosted_by(shape, host)
        if number < op.step and other.kind in AWAITED and (other.ahead or not launch.ahead)
    ]
    if launch.ahead or launch.host.lane != COMPUTE:
        return earlier + _with_launches(shape, _leaf_needs(shape, host))
    return [*earlier, *keys_of(host)]


def _end_needs(shape: PipelineShape, step: StepShape, op: Op) -> list[Key]:
    assert op.stage is not None
    buckets = buckets_of(shape, step, op.stage)
    there = set(ends_at(shape, shape.placement.rank_of[op.stage]))
    if op.kind is kinds.TIED_SUM:
        return [key for bucket in buckets if bucket.tied for key in _filled(shape, bucket.places)]
    if op.kind is kinds.BUCKET_REDUCE:
        bucket = buckets[op.step or 0]
        tied: list[Key] = [(kinds.TIED_SUM, op.stage, None, None)] if bucket.tied else []
        return [*_filled(shape, bucket.places), *tied]
    if op.kind is kinds.RESULTS_GATHER:
        return [(kinds.BUCKET_REDUCE, op.stage, None, None, number) for number in range(len(buckets))]
    if op.kind is kinds.GRAD_STORE:
        return [(kinds.BUCKET_REDUCE, op.stage, None, None, op.step)]
    if op.kind is kinds.GRAD_FETCH:
        taken = next(number for number, bucket in enumerate(buckets) if bucket.turn == op.step)
        return [(kinds.BUCKET_UPDATE, op.stage, None, None, taken)]
    if op.kind in (kinds.BUCKET_GATHER, kinds.BUCKET_STORE):
        return [(kinds.BUCKET_UPDATE, op.stage, None, None, op.step)]
    if op.kind is kinds.BUCKET_FETCH:
        before = in_the_buffer_before(buckets, step, op.step or 0)
        return [] if before is None else [(kinds.BUCKET_STORE, op.stage, None, None, before)]
    told_after = {kinds.LOADS_GATHER: kinds.RESULTS_GATHER, kinds.LOADS_SUM: kinds.LOADS_GATHER}
    if op.kind in told_after:
        return [(told_after[op.kind], op.stage, None, None)]
    number = op.step or 0
    came: list[Key] = []
    ahead = step.next_forward and (kinds.BUCKET_FETCH, number) in fetched_ahead(buckets, step)
    if buckets[number].host_bytes and not ahead:  # what went ahead did so in the step before
        came = [(kinds.BUCKET_FETCH, op.stage, None, None, number)]
    if leaves(buckets, number):
        came.append((kinds.GRAD_FETCH, op.stage, None, None, number))
    if step.next_forward:
        return came
    if step.by_layer:
        same = updated_with(buckets, number)
        return [*came, *((kinds.BUCKET_REDUCE, op.stage, None, None, other) for other in same)]
    told = [kind for kind in (kinds.LOADS_SUM, kinds.LOADS_GATHER, kinds.RESULTS_GATHER) if kind in there]
    return [*came, (told[0], op.stage, None, None), (kinds.BUCKET_REDUCE, op.stage, None, None, number)]


def _filled(shape: PipelineShape, places: Sequence[tuple[int, int]]) -> list[Key]:
    """All weight gradients of some layers."""
    return [
        (KIND_OF[part, Form.W], stage, index, m)
        for stage, index in places
        for m in shape.microbatches_of(stage)
        for part in weight_parts(shape.layers[stage][index])
    ]


def _leaf_needs(shape: PipelineShape, op: Op) -> list[Key]:
    kind, m, stage = op.kind, op.microbatch, -1 if op.stage is None else op.stage
    if kind is kinds.REDUCE:
        return _reduce_needs(shape, stage)
    if m is None:
        return []
    if op.layer is not None:
        return LAYER_NEEDS[kind.form](shape, kind, stage, op.layer, m)
    if kind is kinds.F:
        return _input_of(shape, stage, m)
    if kind is kinds.B or kind is kinds.I:
        return [(kinds.F, stage, None, m), *_gradient_into(shape, stage, m)]
    if kind is kinds.W:
        return [(kinds.B, stage, None, m)]
    if kind is kinds.SEND_F:
        return output_of(shape, stage, m)
    if kind is kinds.SEND_B:
        return gradient_of(shape, stage, m)
    return []


def _reduce_needs(shape: PipelineShape, stage: int) -> list[Key]:
    """All weight gradients of a stage."""
    if not shape.layers:
        return [(kinds.W, stage, None, m) for m in shape.microbatches_of(stage)]
    made = [
        (KIND_OF[part, Form.W], index)
        for index, layer in enumerate(shape.layers[stage])
        for part in weight_parts(layer)
    ]
    return [(kind, stage, index, m) for m in shape.microbatches_of(stage) for kind, index in made]


def _input_of(shape: PipelineShape, stage: int, m: int) -> list[Key]:
    before = shape.placement.previous_stage(stage)
    if before is None:
        return []
    if shape.placement.rank_of[before] == shape.placement.rank_of[stage]:
        return output_of(shape, before, m)
    return [(kinds.RECV_F, stage, None, m)]


def _gradient_into(shape: PipelineShape, stage: int, m: int) -> list[Key]:
    behind = shape.placement.next_stage(stage)
    if behind is None:
        return output_of(shape, stage, m)  # the loss
    if shape.placement.rank_of[behind] == shape.placement.rank_of[stage]:
        return gradient_of(shape, behind, m)
    return [(kinds.RECV_B, stage, None, m)]


def _layer_output(layer: LayerShape, stage: int, index: int, m: int) -> list[Key]:
    return [(kinds.HEAD_F, stage, index, m)] if layer.head else _body_output(layer, stage, index, m)


def _body_output(layer: LayerShape, stage: int, index: int, m: int) -> list[Key]:
    """What the head reads."""
    if not layer.moe:
        return [(kinds.MLP_F, stage, index, m)]
    shared: list[Key] = [(kinds.SHARED_F, stage, index, m)] if layer.shared else []
    return [(kinds.COMBINE_F, stage, index, m), *shared]


def _forward_needs(shape: PipelineShape, kind: Kind, stage: int, index: int, m: int) -> list[Key]:
    layers = shape.layers[stage]
    if kind is kinds.ATTN_F:
        return _layer_output(layers[index - 1], stage, index - 1, m) if index else _input_of(shape, stage, m)
    if kind is kinds.HEAD_F:
        return _body_output(layers[index], stage, index, m)
    source = INPUT_OF[kind.part] if layers[index].moe else Part.ATTN
    return [(KIND_OF[source, Form.F], stage, index, m)]


def _recompute_needs(shape: PipelineShape, kind: Kind, stage: int, index: int, m: int) -> list[Key]:
    layer = shape.layers[stage][index]
    if kind is kinds.ATTN_R:
        came: list[Key] = [(kinds.INPUT_FETCH, stage, index, m)] if layer.host_bytes else []
        return [(kinds.ATTN_F, stage, index, m), *came]
    source = INPUT_OF[kind.part] if layer.moe else Part.ATTN
    form = Form.R if source in layer.recomputed else Form.F
    return [(KIND_OF[source, form], stage, index, m)]


def _backward_needs(shape: PipelineShape, kind: Kind, stage: int, index: int, m: int) -> list[Key]:
    layer, part = shape.layers[stage][index], kind.part
    saved: list[Key] = []
    if part in layer.recomputed:
        saved = [(KIND_OF[part, Form.R], stage, index, m)]
    elif part not in EXCHANGES:
        saved = [(KIND_OF[part, Form.F], stage, index, m)]
    if kind is kinds.HEAD_B:
        return [*saved, *_gradient_into(shape, stage, m)]
    if kind is kinds.COMBINE_B or kind is kinds.SHARED_B or (kind is kinds.MLP_B and not layer.moe):
        return [*saved, *_gradient_of_body(shape, stage, index, m)]
    sources = GRADIENTS_OF[kind] if layer.moe else (kinds.MLP_B,)
    read = (source for source in sources if layer.shared or source is not kinds.SHARED_B)
    return [*saved, *[(source, stage, index, m) for source in read]]


def _gradient_of_body(shape: PipelineShape, stage: int, index: int, m: int) -> list[Key]:
    """What the last parts of a layer read in backward."""
    if shape.layers[stage][index].head:
        return [(kinds.HEAD_B, stage, index, m)]
    if index + 1 < len(shape.layers[stage]):
        return [(kinds.ATTN_B, stage, index + 1, m)]
    return _gradient_into(shape, stage, m)


def _copy_needs(_: PipelineShape, kind: Kind, stage: int, index: int, m: int) -> list[Key]:
    return [(kinds.ATTN_F if kind is kinds.INPUT_STORE else kinds.INPUT_STORE, stage, index, m)]


def _weight_needs(_: PipelineShape, kind: Kind, stage: int, index: int, m: int) -> list[Key]:
    return [(KIND_OF[kind.part, Form.B], stage, index, m)]


LAYER_NEEDS: dict[Form, Callable[[PipelineShape, Kind, int, int, int], list[Key]]] = {
    Form.F: _forward_needs,
    Form.B: _backward_needs,
    Form.R: _recompute_needs,
    Form.W: _weight_needs,
    Form.STORE: _copy_needs,
    Form.FETCH: _copy_needs,
}


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


def pipeline_sources(shape: PipelineShape, ops: Sequence[Op]) -> list[list[int]]:
    """For each op of one rank, the positions of what it reads."""
    table, inputs, weights = tabulate_keys(ops), buffer_sources(shape, ops), weight_sources(shape, ops)
    moved = (inputs.get(position, []) + weights.get(position, []) for position in range(len(ops)))
    return [resolve(shape, op, table) + more for op, more in zip(ops, moved, strict=True)]


def exchange_sources(ops: Sequence[Op]) -> list[list[int]]:
    """The same in the exchange of one layer; weight gradients read every C of their step, or of all."""
    where: dict[tuple[Kind | None, int | None, int | None, int | None], int] = {
        (op.kind, op.step, op.chunk, op.expert): position for position, op in enumerate(ops)
    }
    lent, own = (
        where.get((kinds.SHADOW_SEND, None, None, None)),
        where.get((kinds.SHADOW_F, None, None, None)),
    )
    found: list[list[int]] = []
    for op in ops:
        source = where.get((SOURCE_IN_EXCHANGE.get(op.kind), op.step, op.chunk, op.expert))
        found.append([] if source is None else [source])
        if op.kind is kinds.C_F and lent is not None and own is None:
            found[-1].append(lent)  # who serves others computes with what is lent in every unit
        if op.kind is kinds.SHADOW_REDUCE and source is None:
            found[-1] += [i for i, other in enumerate(ops) if other.kind is kinds.C_W and other.step is None]
        if op.kind is kinds.C_W:
            computed = [i for i, other in enumerate(ops) if other.kind is kinds.C_B]
            found[-1] += [i for i in computed if op.step is None or ops[i].step == op.step]
    return found
