"""Inputs of layers that run again in backward: between forward and backward they lie in the host's memory.

    STORE l m   the input of layer l, microbatch m, behind ATTN_F, which reads it     lane host:store
    FETCH l m   to a buffer of the ring, ahead of ATTN_R                              lane host:fetch
    W           of attention is the last that reads the buffer

Idea. Whole layers that run again keep their inputs alone, and these grow with layers times tokens. Each is
needed twice, far apart. The device has room for `slots` that wait for their way out, and a ring of `slots`
buffers for those that are needed next, in the order of backward.

    an input         may leave its memory when its store has ended: ATTN_F of the layer `slots` stores later
                     waits for that, so that no more than `slots` of them wait
    a buffer         is filled behind the last reader of the input that lay there: `slots` fetches before
    the host's       is filled behind the fetch of the input that lay there: regions are taken in the order of
                     stores, the first that is free

Contract: all follows from the list of a rank, so that the verifier finds it again in any list. The last layer
of a model keeps its input: backward begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Kind, Part
from moeclipse.schedule.memory import layer_memory
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import PipelineShape

WEIGHTS_AT_ONCE = ("1f1b", "1f1b-pairs", "pp1", "gpipe", "vpp", "vpp+1", "layers")
"""Schedules that leave no weight gradients for later: until these, a layer reads its input."""
Flagged = list[tuple[Op, bool]]
"""Ops, and whether each belongs to a serial block."""


class InputKey(NamedTuple):
    """Whose input."""

    stage: int
    layer: int
    microbatch: int

    @classmethod
    def of(cls, op: Op) -> InputKey:
        assert op.stage is not None
        assert op.layer is not None
        assert op.microbatch is not None
        return cls(op.stage, op.layer, op.microbatch)


def travels(shape: PipelineShape, op: Op) -> bool:
    """Whether the input of an op's layer lies on the host for a while."""
    if op.stage is None or op.layer is None or op.microbatch is None or not shape.layers:
        return False
    return shape.layers[op.stage][op.layer].host_bytes > 0


class _Places(NamedTuple):
    """Where in a rank's list those ops stand that read or move an input; of chunks all."""

    entered: list[int]
    again: list[int]
    done: list[int]


def _places(shape: PipelineShape, ops: Sequence[Op]) -> dict[InputKey, _Places]:
    found: dict[InputKey, _Places] = {}
    column = {kinds.ATTN_F: 0, kinds.ATTN_R: 1, kinds.ATTN_W: 2}
    for position, op in enumerate(ops):
        if op.kind in column and travels(shape, op):
            found.setdefault(InputKey.of(op), _Places([], [], []))[column[op.kind]].append(position)
    return found


def with_inputs(shape: PipelineShape, ops: Flagged) -> Flagged:
    """Stores behind the ops that read inputs first, fetches where a buffer is free for them."""
    places = _places(shape, [op for op, _ in ops])
    if not places:
        return ops
    assert shape.step is not None
    for key, place in places.items():
        if not place.again:
            raise ScheduleError(
                f"the input of layer {key.layer}, stage {key.stage}, cannot lie on the host: the layer does "
                "not run again in backward; set recompute to 'full'"
            )
    behind: dict[int, list[Op]] = {}
    for key in sorted(places, key=lambda key: places[key].entered[-1]):
        behind.setdefault(places[key].entered[-1], []).append(_op(shape, kinds.INPUT_STORE, key))
    used = sorted(places, key=lambda key: places[key].again[0])
    at = -1
    for number, key in enumerate(used):
        at = max(at, places[key].entered[-1])
        if number >= shape.step.input_slots:
            at = max(at, places[used[number - shape.step.input_slots]].done[-1])
        if at >= places[key].again[0]:
            raise ScheduleError(
                f"layer {key.layer} of stage {key.stage} reads its input of microbatch {key.microbatch} "
                f"before one of {shape.step.input_slots} buffers is free for it: this schedule leaves weight "
                "gradients for later; choose another one, or more memory.buffers"
            )
        behind.setdefault(at, []).append(_op(shape, kinds.INPUT_FETCH, key))
    found: Flagged = []
    for position, each in enumerate(ops):
        found += [each, *((op, False) for op in behind.get(position, ()))]
    return found


def _op(shape: PipelineShape, kind: Kind, key: InputKey) -> Op:
    alloc, free = layer_memory(shape.layers[key.stage][key.layer], kind)
    return Op(kind=kind, lane=kind.lane, **key._asdict(), alloc=alloc, free=free)


def buffer_sources(shape: PipelineShape, ops: Sequence[Op]) -> dict[int, list[int]]:
    """By position in a list: what has to end before memory that it was read from is filled, or held on to."""
    copies = [position for position, op in enumerate(ops) if op.kind.part is Part.INPUT]
    if not copies:
        return {}
    assert shape.step is not None
    slots, places, found = shape.step.input_slots, _places(shape, ops), dict[int, list[int]]()
    stores = [position for position in copies if ops[position].kind is kinds.INPUT_STORE]
    fetches = [position for position in copies if ops[position].kind is kinds.INPUT_FETCH]
    for before, store in zip(stores, stores[slots:], strict=False):
        for entered in places[InputKey.of(ops[store])].entered:
            found.setdefault(entered, []).append(before)
    for before, fetch in zip(fetches, fetches[slots:], strict=False):
        found.setdefault(fetch, []).extend(places[InputKey.of(ops[before])].done)
    fetch_of = {InputKey.of(ops[position]): position for position in fetches}
    lay_there = host_regions(shape, ops).before
    for store in stores:
        if (before_it := lay_there[InputKey.of(ops[store])]) is not None and before_it in fetch_of:
            found.setdefault(store, []).append(fetch_of[before_it])
    return found


@dataclass(frozen=True)
class HostRegions:
    """Where inputs lie on the host."""

    of: dict[InputKey, int]
    before: dict[InputKey, InputKey | None]
    """Whose input lay there."""

    @property
    def count(self) -> int:
        return max(self.of.values(), default=-1) + 1


def host_regions(shape: PipelineShape, ops: Sequence[Op]) -> HostRegions:
    """Each store takes the first that is free; it is free again when the layer has read what was fetched."""
    found, free, last = HostRegions({}, {}), set[int](), list[InputKey]()
    for op in ops:
        if op.kind is kinds.INPUT_STORE:
            key = InputKey.of(op)
            region = min(free, default=len(last))
            if region == len(last):
                found.before[key] = None
                last.append(key)
            else:
                free.remove(region)
                found.before[key] = last[region]
                last[region] = key
            found.of[key] = region
        elif op.kind is kinds.ATTN_R and travels(shape, op) and (key := InputKey.of(op)) in found.of:
            free.add(found.of[key])  # of each chunk once more
    return found


def ring_buffers(ops: Sequence[Op], slots: int) -> dict[InputKey, int]:
    """Which buffer of the ring each input visits."""
    fetched = (InputKey.of(op) for op in ops if op.kind is kinds.INPUT_FETCH)
    return {key: number % slots for number, key in enumerate(fetched)}
