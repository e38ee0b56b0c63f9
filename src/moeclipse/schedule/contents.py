"""The exact set of ops that a shape asks for, rank by rank.

Compared with what a program holds: what is missing, what is there twice, what belongs elsewhere. A part
that is cut into chunks counts once all its chunks are there.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.needs import Key, keys_of, weight_parts
from moeclipse.schedule.op import KINDS, Op, Program
from moeclipse.schedule.shape import ExchangeShape, PipelineShape

UNCOUNTED = ("UNSHARD", "RESHARD")
"""Read from other tools' files; they carry no data between ops."""
ExchangeKey = tuple[str, int | None, int | None, int | None]


def check_contents(program: Program) -> None:
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if op.kind not in KINDS:
                raise ScheduleError(f"{op} on rank {rank} has the unknown kind {op.kind!r}")
    if isinstance(program.shape, ExchangeShape):
        _check_exchange(program, program.shape)
    else:
        _check_pipeline(program, program.shape)


def _check_pipeline(program: Program, shape: PipelineShape) -> None:
    for rank, ops in enumerate(program.ranks):
        found: dict[Key, list[Op]] = {}
        for op in ops:
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
            _check_chunks(program, rank, key, makers)


def _check_chunks(program: Program, rank: int, key: Key, makers: list[Op]) -> None:
    cuts = sorted((-1 if op.chunk is None else op.chunk) for op in makers)
    whole = cuts == [-1] or (cuts == list(range(makers[0].chunks)) and len({op.chunks for op in makers}) == 1)
    if not whole:
        listed = ", ".join(map(str, makers[:4]))
        raise ScheduleError(
            f"{program.name}: {_name(key)} on rank {rank} is launched as {listed}; "
            "expected it once, or once for every chunk"
        )


def _name(key: Key) -> str:
    kind, stage, layer, microbatch = key
    return str(Op(kind=kind, stage=stage, layer=layer, microbatch=microbatch))


def _wanted(shape: PipelineShape, rank: int) -> Iterator[Key]:
    placement = shape.placement
    for stage in placement.stages_of(rank):
        before, behind = placement.previous_stage(stage), placement.next_stage(stage)
        from_before = before is not None and placement.rank_of[before] != rank
        from_behind = behind is not None and placement.rank_of[behind] != rank
        for m in shape.microbatches_of(stage):
            if from_before:
                yield from ((kind, stage, None, m) for kind in ("RECV_F", "SEND_B"))
            if from_behind:
                yield from ((kind, stage, None, m) for kind in ("SEND_F", "RECV_B"))
            if not shape.layers:
                yield from ((kind, stage, None, m) for kind in ("F", "B", "W"))
                continue
            for index, layer in enumerate(shape.layers[stage]):
                forms = [(part, form) for part in layer.parts for form in ("F", "B")]
                forms += [(part, "W") for part in weight_parts(layer)]
                forms += [(part, "R") for part in layer.recomputed]
                yield from ((f"{part}_{form}", stage, index, m) for part, form in forms)
        if shape.reduce:
            yield ("REDUCE", stage, None, None)


def _check_exchange(program: Program, shape: ExchangeShape) -> None:
    for rank, ops in enumerate(program.ranks):
        found: dict[ExchangeKey, Op] = {}
        for op in ops:
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
    form = "B" if shape.backward else "F"
    experts: range | tuple[None] = range(shape.experts_per_rank) if shape.per_expert else (None,)
    for step in range(shape.num_steps):
        chunks = shape.chunks_of(step)
        for chunk in range(chunks):
            for expert in experts:
                cut = chunk if chunks > 1 else None
                yield from ((f"{part}_{form}", step, cut, expert) for part in ("S", "C", "R"))
    if shape.backward:
        yield ("C_W", None, None, None)
        if shape.own_weights:
            yield ("C_W", 0, None, None)
    if shape.shadows:
        forward = ("SHADOW_SEND", "SHADOW_F")
        backward = ("SHADOW_B", "SHADOW_W", "SHADOW_REDUCE", "SHADOW_ADD")
        yield from ((kind, None, None, None) for kind in (backward if shape.backward else forward))
