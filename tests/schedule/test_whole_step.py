"""Whole steps: what stands where, that all schedules of them are proved, and that a hole is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from whole_steps import SCHEDULES, whole

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import AWAITED, COMPUTE, LAUNCHES, Kind
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.templates import replicate


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_proved_with_all_that_travels_and_for_all_copies(name: str) -> None:
    for overlap, recompute in (("off", "off"), ("pair+self", "full")):
        program = whole(name, overlap, recompute)  # type: ignore[arg-type]
        verify(program)
        everyone = replicate(program)
        assert everyone.num_ranks == 8 * program.num_ranks
        verify(everyone)


def names(program: Program, rank: int = 0) -> list[str]:
    return [str(op) for op in program.ranks[rank]]


def test_launches_stand_around_their_host() -> None:
    found = names(whole("1f1b"))
    at = found.index("0.0ATTN_F0")
    assert found[at - 1 : at + 8] == [
        "0.0TENSOR_F0@4",
        "0.0ATTN_F0",
        "0.0TENSOR_F0@5",
        "0.0ROUTE_F0",
        "0.0LOADS_F0@0",
        "0.0SIZES_F0@1",
        "0.0SHARED_F0",
        "0.0SCORES_F0@2",
        "0.0DISPATCH_F0",
    ]
    sent = found.index("0SEND_F0")
    assert found[sent - 1] == "0.1TENSOR_F0@9"  # launched by who reads the output: here, who sends it


def test_of_a_cut_microbatch_every_chunk_launches_for_itself_but_for_the_loads() -> None:
    found = names(whole("1f1b", "pair+self"))
    assert found.count("0.0LOADS_F0@0") == 1
    assert found.index("0.0ROUTE_F0#1/2") + 1 == found.index("0.0LOADS_F0@0")
    for chunk in range(2):
        assert found.index(f"0.0ROUTE_F0#{chunk}/2") < found.index(f"0.0SIZES_F0@1#{chunk}/2")
    assert not [op for op in found if op.startswith("0.0COMBINE_B") and "#" not in op]


def test_an_exchange_that_runs_for_all_chunks_is_one_op_for_each() -> None:
    """In pairs a microbatch runs whole; where its other half is cut, its exchanges are."""
    found = names(whole("pp1", "pair+self"))
    whole_ones = [name for name in found if "MLP_B0" in name and "#" not in name]
    assert whole_ones
    assert all(f"0.1COMBINE_B0#{chunk}/2" in found for chunk in range(2))
    assert "0.1COMBINE_B0" not in found


def test_the_end_of_a_step() -> None:
    program = whole("1f1b", tied=True)
    found = names(program)
    assert found[found.index("0TIED_SUM") :] == [
        "0TIED_SUM",
        *("0BUCKET_REDUCE@0", "0BUCKET_REDUCE@1"),
        *("0RESULTS_GATHER", "0LOADS_GATHER", "0LOADS_SUM"),
        *("0BUCKET_UPDATE@0", "0BUCKET_UPDATE@1"),
        *("0BUCKET_GATHER@0", "0BUCKET_GATHER@1"),
    ]
    verify(program)
    verify(replicate(program))


def test_a_bucket_is_reduced_where_it_is_full() -> None:
    found = names(whole("1f1b"))
    last = max(at for at, name in enumerate(found) if name.startswith("0.1") and "_W" in name)
    assert found[last + 1] == "0BUCKET_REDUCE@0"
    assert found.index("0BUCKET_REDUCE@1") > found.index("0.0ATTN_W3")


def changed(program: Program, rank: int, ops: list[Op]) -> Program:
    ranks = [*program.ranks]
    ranks[rank] = tuple(ops)
    return replace(program, ranks=tuple(ranks))


@pytest.mark.parametrize(
    "kind", [*LAUNCHES[2:], kinds.RESULTS_GATHER, kinds.BUCKET_REDUCE, kinds.BUCKET_UPDATE], ids=str
)
def test_what_is_left_out_is_missed(kind: Kind) -> None:
    program = whole("1f1b", recompute="full")
    ops = list(program.ranks[0])
    at = next(at for at, op in enumerate(ops) if op.kind is kind)
    kept = ops[:at] + [_without(op, at) for op in ops[at + 1 :]]
    with pytest.raises(ScheduleError, match=f"rank 0 lacks .*{kind}"):
        verify(changed(program, 0, kept))


def _without(op: Op, gone: int) -> Op:
    return op._replace(deps=tuple(dep - (dep > gone) for dep in op.deps if dep != gone))


@pytest.mark.parametrize(
    ("kind", "first"), [(kinds.TENSOR_F, "0.0TENSOR_F0@4"), (kinds.SCORES_F, "0.0SCORES_F0@2")], ids=str
)
def test_what_does_not_wait_for_a_launch_is_refused(kind: Kind, first: str) -> None:
    program = whole("1f1b")
    ops = list(program.ranks[0])
    gone = {at for at, op in enumerate(ops) if op.kind is kind}
    careless = [op._replace(deps=tuple(dep for dep in op.deps if dep not in gone)) for op in ops]
    with pytest.raises(ScheduleError, match=f"reads {first}, which may still run when it starts"):
        verify(changed(program, 0, careless))


def test_the_host_has_waited_for_what_stands_before_on_the_same_lane() -> None:
    program = whole("1f1b")
    ops = list(program.ranks[0])
    sizes = {at for at, op in enumerate(ops) if op.kind is kinds.SIZES_F}
    fewer = [op._replace(deps=tuple(dep for dep in op.deps if dep not in sizes)) for op in ops]
    assert fewer != ops
    verify(changed(program, 0, fewer))


def test_a_collective_on_the_wrong_axis_is_refused() -> None:
    everyone = replicate(whole("1f1b"))
    ops = [
        op._replace(comm=("dense_grads@0", 99)) if op.kind is kinds.LOADS_F else op
        for op in everyone.ranks[0]
    ]
    wrong = changed(everyone, 0, ops)
    with pytest.raises(ScheduleError, match=r"dense_grads@0|must launch the same ops"):
        verify(wrong)


def test_a_rank_that_waits_for_its_peers_in_another_order_stands_still() -> None:
    """One rank sums over tp before it asks for sizes, another behind: each host waits for the other."""
    everyone = replicate(whole("pp1", chunks=1))
    verify(everyone)
    ops = list(everyone.ranks[0])
    first = next(at for at, op in enumerate(ops) if op.kind is kinds.SIZES_F)
    later = next(at for at, op in enumerate(ops) if at > first and op.kind is kinds.TENSOR_F)
    assert ops[later].kind in AWAITED
    order = [*range(first), later, *range(first, later), *range(later + 1, len(ops))]
    new = {old: at for at, old in enumerate(order)}
    moved = [ops[old]._replace(deps=tuple(sorted(new[d] for d in ops[old].deps))) for old in order]
    moved = [
        op._replace(deps=tuple(dep for dep in op.deps if dep < at)) if op.lane != COMPUTE else op
        for at, op in enumerate(moved)
    ]
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(changed(everyone, 0, moved))


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_the_proved_order_a_host_runs_when_others_have_come_to_what_it_waits_for(name: str) -> None:
    program = whole(name, "pair+self", "full")
    for rank, ops in enumerate(program.ranks):
        order = verify(program).proved_order(rank)
        assert sorted(order) == list(range(len(ops)))
        place = {str(ops[position]): number for number, position in enumerate(order)}
        for op in ops:
            if op.kind is kinds.SIZES_F:
                assert place[str(op)] == place[str(op._replace(kind=kinds.ROUTE_F, step=None))] + 1
        seen: set[int] = set()
        for position in order:
            needed = {dep for dep in ops[position].deps if ops[dep].kind not in LAUNCHES}
            if ops[position].kind not in LAUNCHES:
                assert needed <= seen
            seen.add(position)
