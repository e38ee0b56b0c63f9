"""From the ops of microbatches to everything that travels in a step.

    with_launches   behind or in front of an op, the collectives that it launches while it runs
    with_end        behind the microbatches: buckets, the norm, loads, the optimizer, weights to everyone;
                    by layers, updates stand where their gradients are (`schedule/state_travel`), and those of
                    the step before stand in front of their layers' forward
    numbered        groups of ranks, and numbers on them

One op is one launch: of a microbatch that is cut, what travels, and what launches it, is an op a chunk.
Reductions stand behind the op that fills their bucket, in the order that all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moeclipse.schedule import kinds
from moeclipse.schedule.grad_travel import leaves
from moeclipse.schedule.kinds import A2A, AWAITED, COMPUTE, COPIES, LAUNCHES, P2P, Form, Kind, Part
from moeclipse.schedule.launch import BucketShape, HostedLaunch, StepShape, group_name
from moeclipse.schedule.op import Op
from moeclipse.schedule.shape import PipelineShape
from moeclipse.schedule.state_travel import (
    Numbered,
    fetched_ahead,
    layers_of,
    update_order,
    updated_before,
    updates,
)

END_AXES: dict[Kind, str] = {
    kinds.TIED_SUM: "ends",
    kinds.RESULTS_GATHER: "world",
    kinds.LOADS_GATHER: "stage",
    kinds.LOADS_SUM: "line",
    kinds.BUCKET_FETCH: "fetch",
    kinds.BUCKET_STORE: "store",
    kinds.INPUT_FETCH: "fetch",
    kinds.INPUT_STORE: "store",
    kinds.GRAD_FETCH: "fetch",
    kinds.GRAD_STORE: "store",
    kinds.WEIGHTS_FETCH: "fetch",
    kinds.WEIGHTS_STORE: "store",
}
Flagged = list[tuple[Op, bool]]
"""Ops, and whether each belongs to a serial block."""


def cuts_of_ops(ranks: Sequence[Sequence[Op]]) -> dict[int, int]:
    """Chunks of each microbatch that any op of any rank cuts."""
    return {
        op.microbatch: op.chunks for ops in ranks for op in ops if op.chunks > 1 and op.microbatch is not None
    }


def with_launches(shape: PipelineShape, ops: Flagged, cuts: Mapping[int, int]) -> Flagged:
    """`cuts`: into how many chunks microbatches are cut, where they are."""
    found: Flagged = []
    for op, serial in ops:
        chunks = 1 if op.microbatch is None else cuts.get(op.microbatch, 1)
        hosted = hosted_by(shape, op)
        whole = op.layer is not None and op.chunk is None
        if chunks > 1 and whole and (hosted or op.kind.lane == A2A):
            share = op._replace(chunks=chunks, alloc=op.alloc / chunks, free=op.free / chunks)
            parts = [share._replace(chunk=chunk) for chunk in range(chunks)]
        else:
            parts = [op]
        for part in parts:
            passing = range(chunks) if part.chunk is None else (part.chunk,)
            cut = [_made(shape, part, each, (chunk, chunks)) for chunk in passing for each in hosted]
            made = [op for op in cut if op is not None]
            ahead = [op for op in made if hosted_launch(shape, op).ahead]
            behind = [op for op in made if not hosted_launch(shape, op).ahead]
            found += [(each, serial and each is part) for each in (*ahead, part, *behind)]
    return found


def _made(
    shape: PipelineShape, host: Op, hosted: tuple[int, HostedLaunch], cut: tuple[int, int]
) -> Op | None:
    """What a chunk launches in its host; None where all chunks wait for the last."""
    number, launch = hosted
    chunk, chunks = cut
    if launch.once and chunk < chunks - 1:
        return None
    alone = launch.once or chunks == 1
    return Op(
        kind=launch.kind,
        lane=launch.kind.lane,
        stage=host.stage,
        layer=layer_of(shape, host),
        microbatch=host.microbatch,
        step=number,
        chunk=None if alone else chunk,
        chunks=1 if alone else chunks,
    )


def hosted_launch(shape: PipelineShape, op: Op) -> HostedLaunch:
    """What an op of LAUNCHES stands for."""
    assert op.stage is not None
    assert op.layer is not None
    assert op.step is not None
    return shape.layers[op.stage][op.layer].launches[op.step]


def layer_of(shape: PipelineShape, op: Op) -> int:
    """Of an op of a layer; what a stage sends is its last layer's."""
    assert op.stage is not None
    return len(shape.layers[op.stage]) - 1 if op.layer is None else op.layer


def hosts_where_they_meet(shape: PipelineShape, ops: Sequence[Op], order: Sequence[int]) -> list[int]:
    """The order with every host at the place of the last launch behind it that it waits for.

    The host waits inside that op: so it runs when the others of the group have come as far.
    """
    at = {(op.kind, op.stage, op.layer, op.microbatch, op.chunk): where for where, op in enumerate(ops)}
    behind: dict[int, set[int]] = {}
    for where, op in enumerate(ops):
        if op.kind in LAUNCHES and op.kind in AWAITED:
            launch = hosted_launch(shape, op)
            if not launch.ahead:
                host = at[launch.host, op.stage, op.layer, op.microbatch, op.chunk]
                behind.setdefault(host, set()).add(where)
    host_of = {where: host for host, several in behind.items() for where in several}
    found: list[int] = []
    for where in order:
        if where in behind:
            continue
        found.append(where)
        if where in host_of:
            left = behind[host_of[where]]
            left.discard(where)
            if not left:
                found.insert(len(found) - 1, host_of[where])
    return found


def hosted_by(shape: PipelineShape, op: Op) -> tuple[tuple[int, HostedLaunch], ...]:
    """What an op launches beside its own work, each with its number in the layer."""
    if op.stage is None or not shape.layers or op.kind in LAUNCHES:
        return ()
    if op.layer is None and op.kind is not kinds.SEND_F:
        return ()
    return shape.layers[op.stage][layer_of(shape, op)].launches_of.get(op.kind, ())


def launches_in(shape: PipelineShape, stage: int, index: int) -> Iterator[tuple[int, HostedLaunch]]:
    """Those of a layer whose host is there: not every layer recomputes, or sends on."""
    layer, placement = shape.layers[stage][index], shape.placement
    behind = placement.next_stage(stage)
    sends = behind is not None and placement.rank_of[behind] != placement.rank_of[stage]
    for number, launch in enumerate(layer.launches):
        host = launch.host
        if host is kinds.SEND_F:
            there = sends and index == len(shape.layers[stage]) - 1
        else:
            there = host.part in (layer.recomputed if host.form is Form.R else layer.parts)
        if there:
            yield number, launch


def buckets_of(shape: PipelineShape, step: StepShape, stage: int) -> tuple[BucketShape, ...]:
    """Those of the place that holds `stage`."""
    return step.buckets[shape.placement.rank_of[stage]] if step.buckets else ()


def ends_at(shape: PipelineShape, place: int) -> Iterator[Kind]:
    """What a place launches behind its microbatches beside its buckets."""
    assert shape.step is not None
    if shape.step.tied and place in (shape.placement.rank_of[0], shape.placement.rank_of[-1]):
        yield kinds.TIED_SUM
    yield kinds.RESULTS_GATHER
    if shape.step.loads:
        yield kinds.LOADS_GATHER
        if shape.placement.num_ranks > 1:
            yield kinds.LOADS_SUM


def with_end(shape: PipelineShape, place: int, ops: Flagged) -> Flagged:
    """Reductions where buckets are full, and the rest of the step."""
    assert shape.step is not None
    first = min(shape.placement.stages_of(place))
    buckets = buckets_of(shape, shape.step, first)
    ends = [Op(kind=kind, lane=kind.lane, stage=first) for kind in ends_at(shape, place)]
    filled: dict[tuple[int, int], int] = {}
    for position, (op, _) in enumerate(ops):
        if op.kind.form is Form.W and op.stage is not None and op.layer is not None:
            filled[op.stage, op.layer] = position
    step, whole = shape.step, layers_of([bucket.layer for bucket in buckets]) if shape.step.by_layer else {}
    behind: dict[int, list[Op]] = {}
    at = -1
    for number, bucket in enumerate(buckets):
        full = len(ops) if bucket.tied else max((filled[where] for where in bucket.places), default=len(ops))
        at = max(at, full)
        behind.setdefault(at, []).append(_bucket(kinds.BUCKET_REDUCE, first, number))
        if leaves(buckets, number):
            behind[at].append(_bucket(kinds.GRAD_STORE, first, number))
        following = updates(buckets, step, whole.get(number, ()))
        behind[at] += [_bucket(kind, first, each) for kind, each in following]
    front = _under_forward(shape, first, ops) if step.next_forward else {0: fetched_ahead(buckets, step)}
    found: Flagged = []
    for position, (op, serial) in enumerate(ops):
        found += [(_bucket(*each), False) for each in _at(first, front.get(position, ()))]
        found.append((op, serial))
        found += [(reduce, False) for reduce in behind.get(position, ())]
    tail = [op for op in ends if op.kind is kinds.TIED_SUM] + behind.get(len(ops), [])
    tail += [op for op in ends if op.kind is not kinds.TIED_SUM]
    last = () if step.by_layer or step.next_forward else range(len(buckets))
    tail += [_bucket(*each) for each in _at(first, updates(buckets, step, last))]
    tail += [_bucket(kinds.BUCKET_GATHER, first, number) for number in range(len(buckets))]
    return found + [(op, False) for op in tail]


def _under_forward(shape: PipelineShape, first: int, ops: Flagged) -> dict[int, list[Numbered]]:
    """What the step before left to do, by the position of the op that it stands in front of."""
    assert shape.step is not None
    buckets, entered = buckets_of(shape, shape.step, first), dict[tuple[int, int], int]()
    for position, (op, _) in enumerate(ops):
        if op.kind is kinds.ATTN_F and op.stage is not None and op.layer is not None:
            entered.setdefault((op.stage, op.layer), position)
    order = update_order(len(buckets), next_forward=True)
    read = [min((entered[where] for where in buckets[number].places), default=0) for number in order]
    found: dict[int, list[Numbered]] = {}
    for number, position in zip(order, updated_before(read), strict=True):
        found.setdefault(position, []).extend(updates(buckets, shape.step, [number]))
    if found:
        found[max(found)] += fetched_ahead(buckets, shape.step)
    return found


def _at(stage: int, several: Iterable[tuple[Kind, int]]) -> Iterator[tuple[Kind, int, int]]:
    return ((kind, stage, number) for kind, number in several)


def _bucket(kind: Kind, stage: int, number: int) -> Op:
    return Op(kind=kind, lane=kind.lane, stage=stage, step=number)


def axis_of(shape: PipelineShape, op: Op) -> str:
    """On which axis an op of a whole step meets others; transfers between stages have none."""
    assert shape.step is not None
    assert op.stage is not None
    if op.kind in LAUNCHES:
        return hosted_launch(shape, op).axis
    if op.kind.part is Part.BUCKET and op.kind not in COPIES:
        assert op.step is not None
        return buckets_of(shape, shape.step, op.stage)[op.step].axis
    return END_AXES.get(op.kind, shape.step.rows)


def numbered(
    shape: PipelineShape, rank: int, ops: Sequence[Op], groups: dict[str, tuple[int, ...]]
) -> list[Op]:
    """Each op with its group and its number there; `groups` learns of the groups."""
    assert shape.step is not None
    count: dict[str, int] = {}
    found: list[Op] = []
    for op in ops:
        if op.kind.lane not in (COMPUTE, P2P):
            axis = axis_of(shape, op)
            members = shape.step.members(axis, rank, shape.placement.num_ranks, shape.copies)
            group = group_name(axis, members)
            groups[group] = members
            op = op._replace(comm=(group, count.get(group, 0)))
            count[group] = count.get(group, 0) + 1
        found.append(op)
    return found


def shared_communicators(shape: PipelineShape, groups: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """A single stage is everyone: one group of a mesh."""
    if shape.placement.num_ranks > 1:
        return {}
    return {group: group_name("world", (0,)) for group in groups if group.startswith("stage@")}
