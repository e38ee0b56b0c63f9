"""The exact set of ops that a shape asks for, rank by rank.

Compared with what a program holds: what is missing, what is there twice, what belongs elsewhere, and what an
op says of itself that its kind does not have. A part that is cut into chunks counts once all its chunks are
there; a microbatch is cut into one number of them, and what enters or leaves a stage goes chunk by chunk, in
order, because that is how a runtime hands it on.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.action_graph import holds_its_actions
from moeclipse.schedule.kinds import KIND_OF, LAUNCHES, Form, Kind, Part
from moeclipse.schedule.launch import StepShape
from moeclipse.schedule.needs import Key, keys_of, weight_parts
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import ExchangeShape, LayerShape, PipelineShape
from moeclipse.schedule.state_travel import kinds_of as bucket_kinds
from moeclipse.schedule.whole_step import buckets_of, ends_at, launches_in

UNCOUNTED = (kinds.UNSHARD, kinds.RESHARD, *kinds.WEIGHT_COPIES)
"""Read from other tools' files, and carrying no data between ops; weights that travel are counted by those
who read them (`schedule/weight_travel`)."""
ExchangeKey = tuple[Kind, int | None, int | None, int | None]


def check_contents(program: Program) -> None:
    if program.num_ranks != program.shape.num_ranks:
        raise ScheduleError(
            f"{program.name} has lists for {program.num_ranks} ranks, but its shape has "
            f"{program.shape.num_ranks}"
        )
    if isinstance(program.shape, ExchangeShape):
        _check_exchange(program, program.shape)
    else:
        _check_pipeline(program, program.shape)


def _check_pipeline(program: Program, shape: PipelineShape) -> None:
    cuts: dict[int, Op] = {}
    for rank, ops in enumerate(program.ranks):
        found: dict[Key, list[Op]] = {}
        for op in ops:
            check_fields(op, rank)
            if op.chunk is not None:
                _check_cut(op, rank, cuts)
            if op.kind not in UNCOUNTED:
                for key in keys_of(op):
                    found.setdefault(key, []).append(op)
        wanted = set(_wanted(shape, rank // shape.copies))
        if wanted - set(found):
            raise ScheduleError(
                f"{program.name}: rank {rank} lacks {_name(min(wanted - set(found), key=str))}"
            )
        for key, makers in found.items():
            if key not in wanted:
                raise ScheduleError(
                    f"{program.name}: {makers[0]} does not belong on rank {rank}, whose stages are "
                    f"{list(shape.placement.stages_of(rank // shape.copies))}"
                )
            if len(makers) > 1 or makers[0].chunk is not None:
                _check_chunks(program, rank, key, makers)


def check_fields(op: Op, rank: int) -> None:
    """What the kind of an op of a pipeline does not have must be left out."""
    counts = op.kind in LAUNCHES or op.kind.part in (Part.BUCKET, Part.GRAD, Part.WEIGHTS)
    if (op.step is not None) is not counts or op.expert is not None:
        raise ScheduleError(f"{op} on rank {rank} is no exchange of one layer; it has no step and no expert")
    if not holds_its_actions(op):
        raise ScheduleError(
            f"{op} on rank {rank} is a {op.kind} of {len(op.parts)} actions; a PAIR holds two, a SELF one, "
            "and these alone name stages and microbatches"
        )
    if (op.chunk is None and op.chunks != 1) or (op.chunk is not None and op.layer is None):
        raise ScheduleError(
            f"{op} on rank {rank} says chunk {op.chunk} of {op.chunks}; "
            "only parts of layers are cut, and each op names its chunk"
        )


def _check_cut(op: Op, rank: int, cuts: dict[int, Op]) -> None:
    """A runtime cuts a microbatch once, for all stages and both directions."""
    if op.microbatch is not None:
        first = cuts.setdefault(op.microbatch, op)
        if first.chunks != op.chunks:
            raise ScheduleError(
                f"{op} on rank {rank} cuts microbatch {op.microbatch} into {op.chunks} chunks, but {first} "
                f"into {first.chunks}; a microbatch is cut into one number of chunks"
            )


def _check_chunks(program: Program, rank: int, key: Key, makers: list[Op]) -> None:
    cuts = [(-1 if op.chunk is None else op.chunk) for op in makers]
    wanted = list(range(makers[0].chunks))
    listed = ", ".join(map(str, makers[:4]))
    if sorted(cuts) != wanted or len({op.chunks for op in makers}) > 1:
        raise ScheduleError(
            f"{program.name}: {_name(key)} on rank {rank} is launched as {listed}; "
            "expected it once, or once for every chunk"
        )
    if cuts != wanted and _crosses(program.pipeline(), key):
        raise ScheduleError(
            f"{program.name}: {_name(key)} on rank {rank} is launched as {listed}; "
            "chunks enter and leave a stage in order"
        )


def _crosses(shape: PipelineShape, key: Key) -> bool:
    """Whether an op takes what came to its stage, or gives what goes on from there."""
    kind, stage, layer = key[:3]
    if layer == 0 and kind.part is Part.ATTN:
        return True
    return kind.form is Form.B and layer == len(shape.layers[stage]) - 1


def _name(key: Key) -> str:
    kind, stage, layer, microbatch, *number = key
    step = number[0] if number else None
    return str(Op(kind=kind, stage=stage, layer=layer, microbatch=microbatch, step=step))


def _wanted(shape: PipelineShape, rank: int) -> Iterator[Key]:
    placement = shape.placement
    for stage in placement.stages_of(rank):
        before, behind = placement.previous_stage(stage), placement.next_stage(stage)
        from_before = before is not None and placement.rank_of[before] != rank
        from_behind = behind is not None and placement.rank_of[behind] != rank
        each: list[tuple[Kind, int | None]] = []
        if from_before:
            each += [(kinds.RECV_F, None), (kinds.SEND_B, None)]
        if from_behind:
            each += [(kinds.SEND_F, None), (kinds.RECV_B, None)]
        if shape.layers:
            each += [(kind, at) for at, layer in enumerate(shape.layers[stage]) for kind in _kinds_of(layer)]
        else:
            each += [(kinds.F, None), (kinds.B, None), (kinds.W, None)]
        for m in shape.microbatches_of(stage):
            yield from ((kind, stage, index, m) for kind, index in each)
        if shape.reduce:
            yield (kinds.REDUCE, stage, None, None)
    if shape.step is not None:
        yield from _wanted_inputs(shape, rank)
        yield from _wanted_launches(shape, shape.step, rank)


def _wanted_inputs(shape: PipelineShape, place: int) -> Iterator[Key]:
    """Both ways of inputs that lie on the host for a while."""
    for stage in shape.placement.stages_of(place):
        for index, layer in enumerate(shape.layers[stage]):
            for kind in (kinds.INPUT_STORE, kinds.INPUT_FETCH) if layer.host_bytes else ():
                yield from ((kind, stage, index, m) for m in shape.microbatches_of(stage))


def _wanted_launches(shape: PipelineShape, step: StepShape, place: int) -> Iterator[Key]:
    """What ops launch beside rows, and the end of the step."""
    stages = shape.placement.stages_of(place)
    for stage in stages:
        for index in range(len(shape.layers[stage])):
            for number, launch in launches_in(shape, stage, index):
                yield from ((launch.kind, stage, index, m, number) for m in shape.microbatches_of(stage))
    first = min(stages)
    yield from ((kind, first, None, None) for kind in ends_at(shape, place))
    buckets = buckets_of(shape, step, first)
    for number in range(len(buckets)):
        for kind in bucket_kinds(buckets, number):
            yield (kind, first, None, None, number)


def _kinds_of(layer: LayerShape) -> Iterator[Kind]:
    for part in layer.parts:
        yield KIND_OF[part, Form.F]
        yield KIND_OF[part, Form.B]
    yield from (KIND_OF[part, Form.W] for part in weight_parts(layer))
    yield from (KIND_OF[part, Form.R] for part in layer.recomputed)


def _check_exchange(program: Program, shape: ExchangeShape) -> None:
    for rank, ops in enumerate(program.ranks):
        found: dict[ExchangeKey, Op] = {}
        for op in ops:
            chunks = 1 if op.chunk is None else shape.chunks_of(op.step or 0)
            if (
                op.chunks != chunks
                or op.parts
                or op.stage is not None
                or op.layer is not None
                or op.microbatch is not None
            ):
                raise ScheduleError(
                    f"{program.name}: {op} on rank {rank} must be one of {chunks} chunks and name no stage, "
                    "layer or microbatch"
                )
            key = (op.kind, op.step, op.chunk, op.expert)
            if key in found:
                raise ScheduleError(f"{program.name}: rank {rank} launches {op} twice")
            found[key] = op
        wanted = set(_wanted_exchange(shape))
        missing, extra = sorted(wanted - set(found), key=str), sorted(set(found) - wanted, key=str)
        if missing:
            kind, step, chunk, expert = missing[0]
            chunks = shape.chunks_of(step or 0)
            op = Op(kind=kind, step=step, chunk=chunk, chunks=chunks, expert=expert)
            raise ScheduleError(f"{program.name}: rank {rank} lacks {op}")
        if extra:
            raise ScheduleError(f"{program.name}: {found[extra[0]]} does not belong on rank {rank}")


def _wanted_exchange(shape: ExchangeShape) -> Iterator[ExchangeKey]:
    rows = (kinds.S_B, kinds.C_B, kinds.R_B) if shape.backward else (kinds.S_F, kinds.C_F, kinds.R_F)
    experts: range | tuple[None] = range(shape.experts_per_rank) if shape.per_expert else (None,)
    for step in range(shape.num_steps):
        chunks = shape.chunks_of(step)
        for chunk in range(chunks):
            for expert in experts:
                cut = chunk if chunks > 1 else None
                yield from ((kind, step, cut, expert) for kind in rows)
    if shape.backward:
        yield (kinds.C_W, None, None, None)
        if shape.own_weights:
            yield (kinds.C_W, 0, None, None)
    if shape.shadows:
        forward: tuple[Kind, ...] = (kinds.SHADOW_SEND, kinds.SHADOW_F)
        backward: tuple[Kind, ...] = (kinds.SHADOW_B, kinds.SHADOW_W, kinds.SHADOW_REDUCE, kinds.SHADOW_ADD)
        if shape.serving:  # rows and their weight gradients are those of units
            forward, backward = forward[:1], backward[2:]
        yield from ((kind, None, None, None) for kind in (backward if shape.backward else forward))
