"""Optimizer state that lies in the host's memory: around each update it travels to the device and back.

    FETCH k     state of bucket k into a buffer of the ring          lane host:fetch
    UPDATE k    reads and writes it there                            lane compute
    STORE k     from the buffer to where it lay                      lane host:store

Idea. The ring is memory for `slots` large buckets and the small ones between them. It is filled in the order
of updates, each bucket behind the one before it, and from the start again where one would not fit. So FETCH
of a bucket waits for STORE of the last one that lay where it will lie, and for nothing else: the first ones
leave when the step begins and travel under forward.

    end         updates behind the norm of all gradients
    layer       each behind the weight gradients of its layer, the norm being the layer's own: under backward
    forward     those of the step before, each in front of its layers' forward; the first fetches of the next
                ones leave behind the last of them, and travel under backward

Contract: two lanes, one for each direction of the wire; each has a group of one rank, because nobody is met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from moeclipse.schedule import kinds
from moeclipse.schedule.grad_travel import leaves, makes_room_for
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.launch import BucketShape, StepShape

SMALLEST = 1e-4
"""Part of all state below which a bucket stays on the device."""
Numbered = tuple[Kind, int]
"""What is done, and to which bucket."""


class Region(NamedTuple):
    """Where in the ring a bucket's state visits."""

    start: float
    stop: float
    before: int
    """Whose store leaves it free, by place among those that travel; below 0: nobody's of the same step."""

    def overlaps(self, other: Region) -> bool:
        return self.start < other.stop and other.start < self.stop


def ring(sizes: Sequence[float], slots: int) -> list[Region]:
    """Regions of buckets of these sizes, in the order of their updates. Stores end in that order, too."""
    room, at = room_of(sizes, slots), 0.0
    found: list[Region] = []
    for size in sizes:
        at = at if at + size <= room * (1 + 1e-9) else 0.0
        mine = Region(at, at + size, -1)
        met = (place for place in range(len(found) - 1, -1, -1) if found[place].overlaps(mine))
        before = max(next(met, -1), found[-1].before if found else -1)
        found.append(mine._replace(before=before))
        at += size
    return found


def room_of(sizes: Sequence[float], slots: int) -> float:
    """Of a ring: the largest sum of neighbours of whom `slots` are large, more than half of the largest."""
    large = [place for place, size in enumerate(sizes) if 2 * size > max(sizes)]
    if len(large) <= slots:
        return sum(sizes)
    ends = [-1, *large, len(sizes)]
    runs = zip(ends, ends[slots + 1 :], strict=False)
    return max(sum(sizes[first + 1 : last]) for first, last in runs)


def ring_of(buckets: Sequence[BucketShape], step: StepShape) -> Sequence[Region]:
    return _kept_ring(tuple(buckets[number].host_bytes for number in travelling(buckets, step)), step.slots)


@lru_cache(maxsize=64)
def _kept_ring(sizes: tuple[float, ...], slots: int) -> tuple[Region, ...]:
    """Every op of a bucket asks for the whole of it."""
    return tuple(ring(sizes, slots))


def update_order(num_buckets: int, *, next_forward: bool) -> list[int]:
    """As gradients come: from the last layer to the first. Under forward from the first to the last."""
    return list(range(num_buckets))[:: -1 if next_forward else 1]


def travelling(buckets: Sequence[BucketShape], step: StepShape) -> list[int]:
    """Buckets with state in the host's memory, in the order of their updates."""
    order = update_order(len(buckets), next_forward=step.next_forward)
    return [number for number in order if buckets[number].host_bytes]


def updated_before(layers: Sequence[int]) -> list[int]:
    """In front of which layer each update stands, from the first layer of each bucket in their order.

    One that stands behind another waits for it: a bucket of layers 3 to 5 before the experts of 2: both at 2.
    """
    found = list(layers)
    for place in range(len(found) - 2, -1, -1):
        found[place] = min(found[place], found[place + 1])
    return found


def kinds_of(buckets: Sequence[BucketShape], number: int) -> tuple[Kind, ...]:
    """All that is done to a bucket in a step."""
    bucket = buckets[number]
    whole: tuple[Kind, ...] = (kinds.BUCKET_REDUCE, kinds.BUCKET_UPDATE, kinds.BUCKET_GATHER)
    if bucket.host_bytes:
        whole += (kinds.BUCKET_FETCH, kinds.BUCKET_STORE)
    return (*whole, kinds.GRAD_STORE, kinds.GRAD_FETCH) if leaves(buckets, number) else whole


def fetched_ahead(buckets: Sequence[BucketShape], step: StepShape) -> list[Numbered]:
    """What leaves when the step begins: as many as the ring has room for."""
    pairs = zip(travelling(buckets, step), ring_of(buckets, step), strict=True)
    return [(kinds.BUCKET_FETCH, number) for number, region in pairs if region.before < 0]


def updates(buckets: Sequence[BucketShape], step: StepShape, which: Sequence[int]) -> Iterator[Numbered]:
    """The updates of some buckets; behind each whose gradient takes the place of its own; of one that travels
    its way back, then who takes its room."""
    travel, regions = travelling(buckets, step), ring_of(buckets, step)
    at = {number: place for place, number in enumerate(travel)}
    for number in which:
        yield kinds.BUCKET_UPDATE, number
        if (waiting := makes_room_for(buckets, number)) is not None:
            yield kinds.GRAD_FETCH, waiting
        if number in at:
            yield kinds.BUCKET_STORE, number
            for other, region in zip(travel, regions, strict=True):
                if region.before == at[number]:
                    yield kinds.BUCKET_FETCH, other


def in_the_buffer_before(buckets: Sequence[BucketShape], step: StepShape, number: int) -> int | None:
    """The bucket whose state has to leave the buffer before that of `number` can come."""
    travel, regions = travelling(buckets, step), ring_of(buckets, step)
    mine = regions[travel.index(number)]
    before = last_in(regions, mine) if step.next_forward and mine.before < 0 else mine.before
    return travel[before] if before >= 0 else None


def last_in(regions: Sequence[Region], mine: Region) -> int:
    """The last of a step that lies where `mine` does: it is in the way of the next step's first ones."""
    return max(place for place, other in enumerate(regions) if mine.overlaps(other))


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
