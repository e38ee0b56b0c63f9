"""The exchange of one MoE layer in fine steps: S sends rows, C computes them, R returns results.

Ranks form groups in a ring. At step s every rank sends to group g + s and receives from group g - s, so
any number of ranks and any group size match, a ragged last group included. Rows may be cut further into
chunks. All ranks share one order of (step, chunk) units; `plan.search` chooses it.

    forward    a2a      S_0 S_1 ... S_n  shadow parameters  R_0 R_1 ... R_n
               compute      C_0 C_1 ... C_n  shadow rows
    backward   a2a      S_0 S_1 ... S_n  shadow gradients   R_0 R_1 ... R_n
               compute  shadow rows  C_0 dW_0 C_1 ... C_n  dW  add shadow gradients

R_u is launched right behind C_u, never behind the last C. In backward, shadows and own rows need nothing
from others, so they and their dW run while the first S travels; all other dW run while the last R travels.
Shadows that serve other ranks, too, are experts like all others: their parameters come before the rows, which
wait for them, and their gradients go back behind the last dW.

    forward    a2a      parameters  S_0 ... S_n  R_0 ... R_n        compute      C_0 ... C_n
    backward   a2a      S_0 ... S_n  R_0 ... R_n  gradients         compute      C_0 dW_0 C_1 ... C_n  dW  add

The parameters of all shadows travel in one uneven exchange that every rank takes part in, also one that sends
and receives none: so a program depends on whether there are shadows, not on which, and can be kept from step
to step.
Contract: launch order is host order, so S of all units stands before the first C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.memory import event_memory
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import ExchangeShape, Shadow, even_groups

GROUP = "ep"


def natural_units(num_steps: int, chunks: int = 1, own_chunks: int = 0) -> tuple[tuple[int, int], ...]:
    """Own group first, then around the ring; chunks of a step side by side.

    `own_chunks`: of the own group; 0: as many as the others have.
    """
    cuts = [own_chunks or chunks, *[chunks] * (num_steps - 1)]
    return tuple((step, chunk) for step, number in enumerate(cuts) for chunk in range(number))


def end_units(num_steps: int, chunks: int = 1) -> tuple[tuple[int, int], ...]:
    """Own rows first and last: they need no far link, and cover both the first S and the last R.

    Where other steps stay whole, the own rows alone are halved, so that few products become smaller.
    """
    own = max(chunks, 2)
    first, last = (0, 0), (0, own - 1)
    ring = natural_units(num_steps, chunks, own)
    return (first, *(unit for unit in ring if unit not in (first, last)), last)


def exchange_shape(
    num_ranks: int,
    *,
    group_size: int = 1,
    groups: Sequence[Sequence[int]] | None = None,
    chunks: int = 1,
    units: Sequence[tuple[int, int]] | None = None,
    experts_per_rank: int = 1,
    per_expert: bool = False,
    shadows: Sequence[Shadow] = (),
    serving: bool = False,
    backward: bool = False,
    blocking: bool = False,
) -> ExchangeShape:
    """A checked shape; `groups` (any partition of the ranks) overrides `group_size`."""
    ring = even_groups(num_ranks, group_size) if groups is None else tuple(map(tuple, groups))
    if sorted(rank for members in ring for rank in members) != list(range(num_ranks)):
        raise ScheduleError(f"groups {ring} must hold each of the ranks 0..{num_ranks - 1} once")
    if any(not members for members in ring):
        raise ScheduleError(f"groups {ring} must not be empty")
    if chunks < 1 or experts_per_rank < 1:
        raise ScheduleError(f"chunks ({chunks}) and experts_per_rank ({experts_per_rank}) must be at least 1")
    order = natural_units(len(ring), chunks) if units is None else tuple(units)
    own = sum(step == 0 for step, _ in order)
    if not own or sorted(order) != list(natural_units(len(ring), chunks, own)):
        raise ScheduleError(
            f"units must hold each of the {len(ring)} steps x {chunks} chunks once (step 0 may have any "
            f"number of chunks), but are {order}"
        )
    for shadow in shadows:
        ranks = (shadow.owner, *shadow.ranks)
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
            raise ScheduleError(
                f"{shadow} must name distinct ranks below {num_ranks}, the owner not among the others"
            )
    if len({shadow.expert for shadow in shadows}) != len(shadows):
        raise ScheduleError(f"each expert may be shadowed once, but shadows are {list(shadows)}")
    return ExchangeShape(
        groups=ring,
        units=order,
        chunks=chunks,
        experts_per_rank=experts_per_rank,
        per_expert=per_expert,
        shadows=tuple(shadow for shadow in shadows if shadow.ranks),
        serving=serving and any(shadow.ranks for shadow in shadows),
        backward=backward,
        blocking=blocking,
    )


def backward_of(shape: ExchangeShape, *, own_weights: int | None = None) -> ExchangeShape:
    """The shape of the way back. Weight gradients cover its last R, so all own rows cover its first S.

    So do their weight gradients, unless `own_weights` says otherwise: there is work for twice as long before
    something must have arrived, and enough of it is left for the last R. Where steps are cut, the first chunk
    from elsewhere goes before them: it has come by then, and its results can start to travel.
    """
    units = tuple(sorted(shape.units, key=lambda unit: unit[0] > 0))
    if own_weights is None:
        early = shape.num_steps > 1 and not shape.blocking
        own_weights = shape.own_chunks + (shape.chunks > 1) if early else 0
    return replace(shape, backward=True, units=units, own_weights=own_weights)


class _RankList:
    """One rank's list while it grows."""

    def __init__(self, rank: int, shape: ExchangeShape) -> None:
        self.rank, self.shape = rank, shape
        self.ops: list[Op] = []
        self.seq: dict[str, int] = {}

    def add(
        self,
        kind: Kind,
        *,
        unit: tuple[int, int | None] | None = None,
        expert: int | None = None,
        deps: Sequence[int] = (),
        group: str | None = None,
        peers: tuple[int, ...] = (),
    ) -> int:
        comm = None
        if group is not None:
            comm = (group, self.seq.get(group, 0))
            self.seq[group] = comm[1] + 1
        chunks = self.shape.chunks_of(unit[0]) if unit is not None else 1
        alloc, free = event_memory(self.shape, kind)
        op = Op(
            kind=kind,
            lane=kind.lane,
            step=unit[0] if unit else None,
            chunk=unit[1] if unit and chunks > 1 else None,
            chunks=chunks if unit and unit[1] is not None else 1,
            expert=expert,
            deps=tuple(deps),
            comm=comm,
            peers=peers,
            alloc=alloc,
            free=free,
        )
        self.ops.append(op)
        return len(self.ops) - 1

    def peers(self, step: int) -> tuple[int, ...]:
        return self.shape.partners(self.rank, step)


def smart(shape: ExchangeShape) -> Program:
    """The program of one layer's exchange, forward or backward as the shape says."""
    build = _backward if shape.backward else _forward
    ranks = tuple(tuple(build(_RankList(rank, shape))) for rank in range(shape.num_ranks))
    groups = {GROUP: tuple(range(shape.num_ranks))}
    order = "blocking" if shape.blocking else "smart"
    return Program(
        name=f"{order} {'backward' if shape.backward else 'forward'}", ranks=ranks, shape=shape, groups=groups
    )


def _events(shape: ExchangeShape) -> list[tuple[tuple[int, int], int | None]]:
    experts: Sequence[int | None] = range(shape.experts_per_rank) if shape.per_expert else (None,)
    return [(unit, expert) for unit in shape.units for expert in experts]


def _send_all(out: _RankList) -> list[int]:
    events, backward = _events(out.shape), out.shape.backward
    kind = kinds.S_B if backward else kinds.S_F
    return [
        out.add(kind, unit=unit, expert=expert, group=GROUP, peers=out.peers(unit[0]))
        for unit, expert in events
    ]


def _compute_and_return(out: _RankList, sent: list[int], extra: Sequence[int]) -> list[int]:
    """Smart: C_u needs S_u, R_u needs C_u. Blocking: every C needs every S, every R needs every C."""
    events, blocking, backward = _events(out.shape), out.shape.blocking, out.shape.backward
    compute, give = (kinds.C_B, kinds.R_B) if backward else (kinds.C_F, kinds.R_F)
    computed: list[int] = []
    served = extra if out.shape.serving else ()
    own_weights = out.shape.own_weights * len(events) // len(out.shape.units)
    returns: list[tuple[tuple[int, int], int | None]] = []

    def give_back(unit: tuple[int, int], expert: int | None, deps: Sequence[int]) -> None:
        peers = out.peers(unit[0])
        out.add(give, unit=unit, expert=expert, deps=deps, group=GROUP, peers=peers)

    for (unit, expert), source in zip(events, sent, strict=True):
        deps = [*sent, *extra] if blocking else [source, *served]
        computed.append(out.add(compute, unit=unit, expert=expert, deps=deps))
        if blocking:
            returns.append((unit, expert))
        else:
            give_back(unit, expert, computed[-1:])
            if backward and len(computed) == own_weights:
                own = [op for op, ((step, _), _) in zip(computed, events, strict=False) if step == 0]
                out.add(kinds.C_W, unit=(0, None), deps=own)
    if blocking:
        after = list(computed)
        if backward:
            after.append(out.add(kinds.C_W, deps=computed))
        for unit, expert in returns:
            give_back(unit, expert, after)
    return computed


def _forward(out: _RankList) -> list[Op]:
    if out.shape.serving:
        lent = [out.add(kinds.SHADOW_SEND, group=GROUP)]
        _compute_and_return(out, _send_all(out), lent)
        return out.ops
    sent = _send_all(out)
    received = [out.add(kinds.SHADOW_SEND, group=GROUP)] if out.shape.shadows else []
    _compute_and_return(out, sent, received)
    if received:
        out.add(kinds.SHADOW_F, deps=received)
    return out.ops


def _backward(out: _RankList) -> list[Op]:
    sent = _send_all(out)
    reduced: list[int] = []
    if out.shape.shadows and not out.shape.serving:
        first = out.add(kinds.SHADOW_B)
        weights = out.add(kinds.SHADOW_W, deps=[first])
        reduced.append(out.add(kinds.SHADOW_REDUCE, deps=[weights], group=GROUP))
    computed = _compute_and_return(out, sent, reduced)
    if not out.shape.blocking:
        out.add(kinds.C_W, deps=computed)
    if out.shape.serving:
        last = max(position for position, op in enumerate(out.ops) if op.kind is kinds.C_W)
        reduced.append(out.add(kinds.SHADOW_REDUCE, deps=[last], group=GROUP))
    if reduced:
        out.add(kinds.SHADOW_ADD, deps=reduced)
    return out.ops
