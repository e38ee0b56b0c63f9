"""Who meets whom: what an op that communicates must say, and which ops of which ranks belong together.

    check_launches   by kind: a group, its members, a lane that carries this kind, the peers it exchanges with
    match            the k-th op of a rank on a group meets the k-th op of every other member

An op of a whole place of the pipeline meets all copies that stand there, a transfer the same copy at the
other end, an exchange everyone; so what a program may not do is leave somebody out.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.kinds import COMPUTE, ENDS, P2P, TRANSFERS, Form, Part
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import ExchangeShape, PipelineShape
from moeclipse.schedule.whole_step import axis_of

ROWS = (Part.S, Part.R)
"""Parts of an exchange that meet only those whose rows they carry."""


def check_launches(program: Program) -> None:
    """Every op says by kind what it takes to launch it: raises with the first that does not."""
    for rank, ops in enumerate(program.ranks):
        fine: set[tuple[object, ...]] = set()  # ops say the same things over and over
        for op in ops:
            if op.kind.lane == COMPUTE:
                if op.comm is not None or op.peers or op.lane != COMPUTE:
                    raise ScheduleError(
                        f"{op} on rank {rank} computes: it stands on lane {COMPUTE!r} and meets nobody, but "
                        f"has lane {op.lane!r}, comm {op.comm} and peers {list(op.peers)}"
                    )
                continue
            if op.comm is None:
                raise ScheduleError(
                    f"{op} on rank {rank} communicates, but names no group; give it comm = (group, number)"
                )
            said = (op.kind, op.lane, op.comm[0], op.stage, op.layer, op.step, op.peers)
            if said not in fine:
                _check_lane(rank, op)
                _check_members(program, rank, op, op.comm[0])
                fine.add(said)


def _check_lane(rank: int, op: Op) -> None:
    carried = op.lane.startswith(f"{P2P}:") if op.kind.lane == P2P else op.lane == op.kind.lane
    if not carried:
        raise ScheduleError(
            f"{op} on rank {rank} stands on lane {op.lane!r}, which does not carry it; "
            f"expected {op.kind.lane!r}"
        )


def _check_members(program: Program, rank: int, op: Op, group: str) -> None:
    members = program.groups.get(group)
    if members is None:
        raise ScheduleError(_unknown(program, group))
    expected = _expected_members(program, rank, op)
    if members != expected and (op.kind in TRANSFERS or tuple(sorted(members)) != expected):
        raise ScheduleError(
            f"{op} on rank {rank} uses group {group!r}, whose members are {list(members)}; "
            f"it goes {'from and to' if op.kind in TRANSFERS else 'among'} {list(expected)}"
        )
    if not op.peers:
        return
    wanted = expected
    if isinstance(program.shape, ExchangeShape) and op.kind.part in ROWS and op.step is not None:
        wanted = program.shape.partners(rank, op.step)
    if not set(wanted) <= set(op.peers) <= set(expected):
        raise ScheduleError(
            f"{op} on rank {rank} names peers {list(op.peers)}, but exchanges with {list(wanted)}"
        )


def _expected_members(program: Program, rank: int, op: Op) -> tuple[int, ...]:
    shape = program.shape
    if isinstance(shape, ExchangeShape):
        return tuple(range(shape.num_ranks))
    place, copy = shape.place_of(rank)
    if op.kind not in TRANSFERS and shape.step is not None:
        places = shape.placement.num_ranks
        return shape.step.members(axis_of(shape, op), rank, places, shape.copies)
    if op.kind not in TRANSFERS:
        return tuple(range(place * shape.copies, (place + 1) * shape.copies))
    other = _other_end(shape, op)
    far = None if other is None else shape.placement.rank_of[other] * shape.copies + copy
    if far is None:
        raise ScheduleError(f"{op} on rank {rank} has nobody at its other end")
    return (rank, far) if op.kind.part is Part.SEND else (far, rank)


def _other_end(shape: PipelineShape, op: Op) -> int | None:
    """The stage at the other end of a transfer."""
    assert op.stage is not None
    forward = (op.kind.form is Form.F) == (op.kind.part is Part.SEND)
    return shape.placement.next_stage(op.stage) if forward else shape.placement.previous_stage(op.stage)


def _unknown(program: Program, group: str) -> str:
    known = ", ".join(sorted(program.groups)) or "none"
    return f"group {group!r} has no members listed; known groups: {known}"


def match(program: Program) -> list[list[tuple[int, int]]]:
    """(rank, node) of the ops that meet; raises when two members of a group disagree."""
    launched: dict[str, dict[int, list[tuple[int, Op]]]] = {}
    node = 0
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if op.comm is not None:
                launched.setdefault(op.comm[0], {}).setdefault(rank, []).append((node, op))
            node += 1
    meetings: list[list[tuple[int, int]]] = []
    for group, by_rank in launched.items():
        members = program.groups.get(group)
        if members is None:
            raise ScheduleError(_unknown(program, group))
        strangers = sorted(set(by_rank) - set(members))
        if strangers:
            rank, op = strangers[0], by_rank[strangers[0]][0][1]
            raise ScheduleError(
                f"{op} on rank {rank} uses group {group!r}, whose members are {list(members)}"
            )
        meetings += _match_group(program, group, members, by_rank)
    return meetings


def _match_group(
    program: Program, group: str, members: Sequence[int], by_rank: dict[int, list[tuple[int, Op]]]
) -> list[list[tuple[int, int]]]:
    lists = [by_rank.get(rank, []) for rank in members]
    if len(members) == 1:  # nobody to meet: the order alone can be wrong
        for k, (_, op) in enumerate(lists[0]):
            if op.comm != (group, k):
                raise ScheduleError(
                    f"group {group!r}: op number {k} of rank {members[0]} is {op}, numbered {op.comm}"
                )
        return []
    meetings = []
    for k in range(max(map(len, lists))):
        present = [
            (rank, entries[k]) for rank, entries in zip(members, lists, strict=True) if k < len(entries)
        ]
        lead_rank, (_, lead) = present[0]
        for rank, (_, op) in present:
            assert op.comm is not None
            if _signature(program, op) != _signature(program, lead) or op.comm[1] != k:
                raise ScheduleError(
                    f"group {group!r}: op number {k} is {lead} on rank {lead_rank} but {op} (numbered "
                    f"{op.comm[1]}) on rank {rank}; all members must launch the same ops in the same order"
                )
        missing = [rank for rank, entries in zip(members, lists, strict=True) if k >= len(entries)]
        if missing:
            raise ScheduleError(
                f"group {group!r}: {lead} on rank {lead_rank} meets nothing, because rank {missing[0]} "
                f"launches only {len(by_rank.get(missing[0], []))} ops there; a matching op is missing"
            )
        _check_directions(group, present)
        _check_peers(group, members, present)
        meetings.append([(rank, node) for rank, (node, _) in present])
    return meetings


def _signature(program: Program, op: Op) -> tuple[object, ...]:
    """What matched ops must agree on; a transfer is named by its sending stage on both sides."""
    if op.kind in ENDS:  # places have stages and buckets of their own
        return (op.kind, op.step)
    if op.kind not in TRANSFERS:
        return (op.kind, op.stage, op.layer, op.microbatch, op.step, op.chunk, op.chunks, op.expert)
    stage, form = op.stage, op.kind.form
    if op.kind.part is Part.RECV and stage is not None:
        placement = program.pipeline().placement
        stage = placement.previous_stage(stage) if form is Form.F else placement.next_stage(stage)
    return (form, stage, op.microbatch)


def _check_directions(group: str, present: Sequence[tuple[int, tuple[int, Op]]]) -> None:
    for index, (rank, (_, op)) in enumerate(present):
        if op.kind in TRANSFERS:
            expected = Part.RECV if index else Part.SEND
            if op.kind.part is not expected:
                raise ScheduleError(
                    f"group {group!r} flows one way: {op} on rank {rank} should be a {expected.name}"
                )


def _check_peers(group: str, members: Sequence[int], present: Sequence[tuple[int, tuple[int, Op]]]) -> None:
    if not any(op.peers for _, (_, op) in present):
        return  # all meet all
    everyone = frozenset(members)
    peers = {rank: frozenset(op.peers) or everyone for rank, (_, op) in present}
    for rank, (_, op) in present:
        alone = [
            peer for peer in peers[rank] if peer not in peers or (peer != rank and rank not in peers[peer])
        ]
        if alone:
            raise ScheduleError(
                f"group {group!r}: {op} on rank {rank} exchanges with rank {min(alone)}, but not the reverse"
            )
