"""Weights of experts that lie in the host's memory: layer by layer they visit a ring of the device.

    FETCH l n   weights of layer l, for the n-th time in a step, to its buffer     lane host:fetch
    STORE l n   back, behind the updates that wrote them, where they are trained   lane host:store

Idea. Layers with experts take the buffers of the ring in turn: the i-th of them always buffer i mod slots, so
that a layer's weights have one address. What takes a buffer next leaves as soon as its last reader is done:
`slots - 1` layers ahead. Backward begins with the layers that forward ended with, and the next forward with
those that backward ended with: they are there already. So a microbatch moves the weights of all other layers
in once for forward and once for backward; layer by layer a whole step does.

    weights     are read by forward, recompute and dX of experts, and written by their updates: all these come
                behind the FETCH, and find no other layer's in the buffer
    a buffer    is filled behind its last reader, and behind the STORE of what was written there
    the host's  is read behind the last STORE
    a step      begins and ends with the first `slots` layers in the ring, and with nothing unsaved

Contract: all follows from the list of a rank, so that the verifier finds it again in any list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Form, Kind, Part
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import PipelineShape
from moeclipse.schedule.whole_step import buckets_of

READERS = (kinds.MLP_F, kinds.MLP_R, kinds.MLP_B)
Flagged = list[tuple[Op, bool]]
"""Ops, and whether each belongs to a serial block."""


class LayerPlace(NamedTuple):
    stage: int
    layer: int
    """Position inside the stage."""


class Touch(NamedTuple):
    """An op that needs a layer's weights on the device."""

    position: int
    number: int
    """Of the layer among those that travel."""
    writes: bool


def travelling_layers(shape: PipelineShape) -> list[LayerPlace]:
    """Those whose weights lie on the host, in the order of the model; they are all on one rank."""
    places = [
        LayerPlace(stage, at)
        for stage, layers in enumerate(shape.layers)
        for at, layer in enumerate(layers)
        if layer.weight_bytes
    ]
    copies = 1 if shape.step is None else shape.step.copies
    if places and (num_ranks := shape.placement.num_ranks * copies) > 1:
        raise ScheduleError(f"weights on the host need one rank, not {num_ranks}")
    return places


def touches(shape: PipelineShape, ops: Sequence[Op]) -> Iterator[Touch]:
    """What reads or writes weights that travel, in the order of a list."""
    assert shape.step is not None
    number_of = {place: number for number, place in enumerate(travelling_layers(shape))}
    first = shape.first_layers
    for position, op in enumerate(ops):
        if op.kind in READERS and op.stage is not None and op.layer is not None:
            below = first[op.stage] + op.layer < shape.step.first_backward
            place = LayerPlace(op.stage, op.layer)
            if place in number_of and (op.kind.form is Form.F or not below):
                yield Touch(position, number_of[place], False)
        elif op.kind is kinds.BUCKET_UPDATE and op.stage is not None:
            bucket = buckets_of(shape, shape.step, op.stage)[op.step or 0]
            for stage, layer in bucket.places if bucket.weights else ():
                yield Touch(position, number_of[LayerPlace(stage, layer)], True)


@dataclass(kw_only=True)
class Visit:
    """Of one layer's weights in the ring."""

    number: int
    last: int
    """Position of the last op that reads them."""
    written: int = -1
    """... and that writes them."""


def visits(shape: PipelineShape, ops: Sequence[Op]) -> list[list[Visit]]:
    """Of each buffer, one after the other; a step begins with one of the first layers in each."""
    assert shape.step is not None
    found = [[Visit(number=slot, last=-1)] for slot in range(shape.step.weight_slots)]
    for position, number, writes in touches(shape, ops):
        buffer = found[number % len(found)]
        if buffer[-1].number != number:
            buffer.append(Visit(number=number, last=position))
        buffer[-1].last = position
        if writes:
            buffer[-1].written = position
    for slot, buffer in enumerate(found):
        if buffer[-1].number != slot:
            buffer.append(Visit(number=slot, last=len(ops)))
    return found


def with_weights(shape: PipelineShape, ops: Flagged) -> Flagged:
    """Stores behind updates, fetches where a buffer is free for them."""
    places, plain = travelling_layers(shape), [op for op, _ in ops]
    if not places:
        return ops
    behind: dict[int, list[tuple[Kind, int]]] = {}
    for buffer in visits(shape, plain):
        for visit, following in zip(buffer, [*buffer[1:], None], strict=True):
            at = end_of(plain, visit.last, places[visit.number])
            if visit.written >= 0:
                behind.setdefault(visit.written, []).append((kinds.WEIGHTS_STORE, visit.number))
                at = max(at, visit.written)
            if following is not None:
                behind.setdefault(at, []).append((kinds.WEIGHTS_FETCH, following.number))
    found: Flagged = []
    count: dict[tuple[Kind, int], int] = {}

    def moved(kind: Kind, number: int) -> Op:
        count[kind, number] = count.get((kind, number), -1) + 1
        stage, layer = places[number]
        return Op(kind=kind, lane=kind.lane, stage=stage, layer=layer, step=count[kind, number])

    for position in range(-1, len(ops)):
        found += [ops[position]] if position >= 0 else []
        found += [(moved(*each), False) for each in behind.get(position, ())]
    return found


def end_of(ops: Sequence[Op], last: int, place: LayerPlace) -> int:
    """Where a layer ends that reads its weights at `last`: autograd comes back to us no earlier."""
    end = last
    for position in range(last + 1, len(ops)):
        op = ops[position]
        if op.layer is not None and (op.stage, op.layer) != place:
            break
        end = position if op.layer is not None else end
    return end


@dataclass(kw_only=True)
class Buffer:
    """Of the ring, as a list goes on."""

    number: int
    """Of the layer whose weights are in it ..."""
    came: int | None = None
    """... since this FETCH; None: since the step before."""
    reader: int | None = None
    """The last; compute runs in order."""
    written: list[int] = field(default_factory=list)
    """By these updates, and not on the host yet."""


def weight_sources(shape: PipelineShape, ops: Sequence[Op]) -> dict[int, list[int]]:
    """By position in a list: what has to end before weights are read, written, stored or overwritten.

    ScheduleError where an op would find another layer's weights, or the host old ones.
    """
    places = travelling_layers(shape)
    copies = {at: op for at, op in enumerate(ops) if op.kind.part is Part.WEIGHTS}
    if not places:
        if copies:
            raise ScheduleError(f"{next(iter(copies.values()))} moves weights that do not travel")
        return {}
    assert shape.step is not None
    ring = [Buffer(number=slot) for slot in range(shape.step.weight_slots)]
    number_of = {place: number for number, place in enumerate(places)}
    needed = {touch.position: touch for touch in touches(shape, ops)}
    left: dict[int, int] = {}
    count: dict[tuple[Kind, int], int] = {}
    found: dict[int, list[int]] = {}
    for position in sorted({*copies, *needed}):
        if position in needed:
            number = needed[position].number
            buffer = ring[number % len(ring)]
            if buffer.number != number:
                raise ScheduleError(
                    f"{ops[position]} needs weights that are not there: its buffer holds those of "
                    f"{places[buffer.number]}; fetch them before"
                )
            found[position] = [] if buffer.came is None else [buffer.came]
            buffer.reader = position
            buffer.written += [position] if needed[position].writes else []
            continue
        op = copies[position]
        number = number_of.get(LayerPlace(op.stage or 0, op.layer or 0), -1)
        if number < 0 or count.get((op.kind, number), 0) != op.step:
            raise ScheduleError(f"{op} is no move of weights that this list has")
        count[op.kind, number] = (op.step or 0) + 1
        buffer = ring[number % len(ring)]
        if op.kind is kinds.WEIGHTS_STORE:
            if buffer.number != number or not buffer.written:
                raise ScheduleError(f"{op} stores weights that nobody wrote")
            found[position], buffer.written = buffer.written, []
            left[number] = position
            continue
        if buffer.number == number:
            raise ScheduleError(f"{op} fetches weights that are there already")
        if buffer.written:
            raise ScheduleError(f"{op} overwrites what {ops[buffer.written[-1]]} wrote; store it before")
        before = (buffer.reader, left.get(buffer.number), left.get(number))
        found[position] = [source for source in before if source is not None]
        ring[number % len(ring)] = Buffer(number=number, came=position)
    _check_end(ring, places)
    return found


def _check_end(ring: Sequence[Buffer], places: Sequence[LayerPlace]) -> None:
    for slot, buffer in enumerate(ring):
        if buffer.number != slot:
            raise ScheduleError(
                f"a step ends with weights of {places[buffer.number]} where the next begins with those of "
                f"{places[slot]}; fetch these"
            )
        if buffer.written:
            raise ScheduleError(f"a step ends, and the host has old weights of {places[slot]}; store them")
