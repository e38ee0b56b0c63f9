"""Optimizer state that lies in the host's memory: around each update it travels to the device and back.

    FETCH k     state of bucket k into a buffer of the ring          lane host:fetch
    UPDATE k    reads and writes it there                            lane compute
    STORE k     from the buffer to where it lay                      lane host:store

Idea. The ring has `slots` buffers, taken in turn by the buckets whose state travels, in the order of their
updates. So FETCH of the j-th of them waits for STORE of the one `slots` places before it, and for nothing
else: the first ones leave when the step begins and travel under forward.

    end         updates behind the norm of all gradients
    layer       each behind the weight gradients of its layer, the norm being the layer's own: under backward

Contract: two lanes, one for each direction of the wire; each has a group of one rank, because nobody is met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.launch import BucketShape, StepShape

SMALLEST = 1e-4
"""Part of all state below which a bucket stays on the device."""
Numbered = tuple[Kind, int]
"""What is done, and to which bucket."""


def travelling(buckets: Sequence[BucketShape]) -> list[int]:
    """Buckets with state in the host's memory, in the order of their updates."""
    return [number for number, bucket in enumerate(buckets) if bucket.host_bytes]


def kinds_of(bucket: BucketShape) -> tuple[Kind, ...]:
    """All that is done to a bucket in a step."""
    whole = (kinds.BUCKET_REDUCE, kinds.BUCKET_UPDATE, kinds.BUCKET_GATHER)
    return (*whole, kinds.BUCKET_FETCH, kinds.BUCKET_STORE) if bucket.host_bytes else whole


def fetched_ahead(buckets: Sequence[BucketShape], step: StepShape) -> list[Numbered]:
    """What leaves when the step begins: as many as the ring has buffers."""
    return [(kinds.BUCKET_FETCH, number) for number in travelling(buckets)[: step.slots]]


def updates(buckets: Sequence[BucketShape], step: StepShape, which: Sequence[int]) -> Iterator[Numbered]:
    """The updates of some buckets; behind each that travels, its way back and the next one's here."""
    travel = travelling(buckets)
    at = {number: place for place, number in enumerate(travel)}
    for number in which:
        yield kinds.BUCKET_UPDATE, number
        if number in at:
            yield kinds.BUCKET_STORE, number
            following = at[number] + step.slots
            if following < len(travel):
                yield kinds.BUCKET_FETCH, travel[following]


def in_the_buffer_before(buckets: Sequence[BucketShape], step: StepShape, number: int) -> int | None:
    """The bucket whose state has to leave the buffer before that of `number` can come."""
    travel = travelling(buckets)
    place = travel.index(number) - step.slots
    return travel[place] if place >= 0 else None


def updated_with(buckets: Sequence[BucketShape], number: int) -> list[int]:
    """Buckets whose gradients make up the norm of this one's layer."""
    return [other for other, bucket in enumerate(buckets) if bucket.layer == buckets[number].layer]


def layers_of(names: Sequence[str]) -> dict[int, list[int]]:
    """The buckets of each layer by the number of the last, from all buckets' layers; these are neighbours."""
    runs = [list(run) for _, run in groupby(range(len(names)), key=names.__getitem__)]
    return {run[-1]: run for run in runs}


def spread(sizes: Sequence[tuple[str, float]], share: float) -> list[str]:
    """Names of the buckets that travel, from (name, size) in the order of their updates.

    Evenly over backward: of every ten in a row as many as the share says, so that the wire works while the
    layers between them compute. The last ones stay where some do: the ways back of those before them need
    something to hide behind. Small ones stay: a copy of some kilobytes costs more than it saves.
    """
    total = sum(size for _, size in sizes)
    large = [(name, size) for name, size in sizes if size > SMALLEST * total]
    whole = sum(size for _, size in large)
    found, seen, taken = set[str](), 0.0, 0.0
    for name, size in reversed(large):
        seen += size
        if taken + size <= share * seen:
            taken += size
            found.add(name)
    for name, size in large:  # what the rounding above left out
        if name not in found and taken + size / 2 <= share * whole:
            taken += size
            found.add(name)
    return [name for name, _ in large if name in found]
