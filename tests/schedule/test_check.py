"""The verifier catches what would deadlock, race or compute something twice, and names the ops."""

from __future__ import annotations

import random

import pytest
from edits import swapped, with_rank
from oracle import why_broken

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import Op, Program, backward, forward, pair, pipeline_program
from moeclipse.schedule.shape import StagePlacement
from moeclipse.schedule.smart import exchange_shape, smart


def fuse_pairs(program: Program) -> Program:
    """Every F directly followed by a B becomes a PAIR."""
    ranks = []
    for ops in program.ranks:
        fused: list[Op] = []
        for op in ops:
            if op.kind is kinds.B and fused and fused[-1].kind is kinds.F:
                fused[-1] = pair(fused[-1], op)
            else:
                fused.append(op)
        ranks.append(fused)
    shape = program.pipeline()
    return pipeline_program(f"{program.name} fused", ranks, shape.placement, shape.num_microbatches)


def test_swapping_dependent_actions_is_caught_everywhere() -> None:
    """F and B of one microbatch, exchanged on any rank: a cycle that names both."""
    program = build("1f1b", 3, 5)
    for rank, ops in enumerate(program.ranks):
        for m in range(5):
            i = next(k for k, op in enumerate(ops) if str(op) == f"{rank}F{m}")
            j = next(k for k, op in enumerate(ops) if str(op) == f"{rank}B{m}")
            bad = with_rank(program, rank, swapped(list(ops), i, j))
            with pytest.raises(ScheduleError, match="wait for each other in a circle") as caught:
                verify(bad)
            assert f"on rank {rank}" in str(caught.value)
            with pytest.raises(ScheduleError, match=r"launched only after|not launched before"):
                verify(lower_swapped(program, rank, m))


def lower_swapped(program: Program, rank: int, m: int) -> Program:
    lowered = lower(program)
    ops = list(lowered.ranks[rank])
    i = next(k for k, op in enumerate(ops) if str(op) == f"{rank}F{m}")
    j = next(k for k, op in enumerate(ops) if str(op) == f"{rank}B{m}")
    return with_rank(lowered, rank, swapped(ops, i, j))


def run_adversarially(program: Program, rng: random.Random) -> None:
    """An interpreter that knows no graphs: random progress, rendezvous, and inputs checked by name."""
    lanes: dict[tuple[int, str], list[int]] = {}
    for rank, ops in enumerate(program.ranks):
        for position, op in enumerate(ops):
            lanes.setdefault((rank, op.lane), []).append(position)
    done: set[tuple[int, int]] = set()
    made: set[tuple[str, int | None, int | None]] = set()
    placement = program.pipeline().placement
    while any(lanes.values()):
        ready: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for (rank, lane), queue in lanes.items():
            if queue and all((rank, d) in done for d in program.ranks[rank][queue[0]].deps):
                op = program.ranks[rank][queue[0]]
                ready.setdefault(op.comm or (f"alone {rank} {lane}", 0), []).append((rank, lane))
        able = [who for key, who in ready.items() if key[0].startswith("alone") or len(who) == 2]
        assert able, "stuck"
        for rank, lane in rng.choice(able):
            position = lanes[rank, lane].pop(0)
            op = program.ranks[rank][position]
            done.add((rank, position))
            stage, m = op.stage, op.microbatch
            assert stage is not None
            before, behind = placement.previous_stage(stage), placement.next_stage(stage)
            if op.kind is kinds.F:
                assert before is None or (kinds.F, before, m) in made
                assert before is None or placement.rank_of[before] == rank or (kinds.RECV_F, stage, m) in made
            if op.kind is kinds.I:
                assert (kinds.F, stage, m) in made
                assert behind is None or (kinds.I, behind, m) in made
                assert behind is None or placement.rank_of[behind] == rank or (kinds.RECV_B, stage, m) in made
            if op.kind in (kinds.W, kinds.SEND_B):
                assert (kinds.I, stage, m) in made
            if op.kind is kinds.SEND_F:
                assert (kinds.F, stage, m) in made
            made.add((op.kind, stage, m))


def test_whatever_passes_runs_under_an_adversary() -> None:
    """Random swaps: what the verifier lets through ends and finds its inputs, whoever goes first."""
    lowered = lower(build("zb-v", 3, 5))
    rng = random.Random(0)
    passed = refused = 0
    for _ in range(200):
        rank = rng.randrange(3)
        ops = list(lowered.ranks[rank])
        i = rng.randrange(len(ops) - 1)
        j = min(len(ops) - 1, i + rng.randint(1, 6))
        mutant = with_rank(lowered, rank, swapped(ops, i, j))
        try:
            verify(mutant)
        except ScheduleError:
            refused += 1
        else:
            passed += 1
            for _ in range(3):
                run_adversarially(mutant, rng)
    assert passed > 15
    assert refused > 100


def test_plain_1f1b_and_vpp_are_refused_when_fused() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: \(3F0;3B0\) on rank 3 .*cycle is 3F0 -> 3B0"):
        verify(fuse_pairs(build("1f1b", 4, 8)))
    with pytest.raises(ScheduleError, match=r"deadlock: \(7F0;7B0\) on rank 3 .*cycle is 7F0 -> 7B0"):
        verify(fuse_pairs(build("vpp", 4, 8, 2)))
    for P, M, V in [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)]:
        with pytest.raises(ScheduleError, match="the cycle is"):
            verify(fuse_pairs(build("vpp", P, M, V)))
        verify(build("vpp+1", P, M, V))


def test_a_dependent_pair_is_refused_across_stages_with_its_path() -> None:
    ranks = [
        [forward(0, 0), forward(1, 0), pair(forward(0, 1), backward(1, 0)), forward(1, 1)],
        [],
    ]
    ranks[0] += [
        pair(forward(0, 2), backward(1, 2)),
        backward(0, 0),
        backward(1, 1),
        backward(0, 1),
        forward(1, 2),
    ]
    ranks[0] += [backward(0, 2)]
    placement = StagePlacement(num_ranks=2, rank_of=(0, 0))
    with pytest.raises(ScheduleError, match="0F2 -> 1F2 -> 1B2 -> "):
        verify(pipeline_program("bad", ranks, placement, 3))


def test_inline_hosts_are_considered() -> None:
    """Streams run this, but a host that computes inline never reaches the send its own input waits for."""
    lowered = lower(build("zb-h1", 2, 1))
    ops = list(lowered.ranks[0])
    send = next(i for i, op in enumerate(ops) if op.kind is kinds.SEND_F)
    order = [*range(send), *range(send + 1, len(ops)), send]
    place = {old: new for new, old in enumerate(order)}
    moved = [ops[old]._replace(deps=tuple(sorted(place[d] for d in ops[old].deps))) for old in order]
    bad = with_rank(lowered, 0, moved)
    run_adversarially(bad, random.Random(0))
    with pytest.raises(ScheduleError, match="0SEND_F0 on rank 0 is launched after the host has finished 0W0"):
        verify(bad)


def test_missing_dependency_is_a_race() -> None:
    lowered = lower(build("1f1b", 2, 2))
    ops = list(lowered.ranks[1])
    i = next(k for k, op in enumerate(ops) if str(op) == "1F1")
    bad = with_rank(lowered, 1, [op._replace(deps=()) if k == i else op for k, op in enumerate(ops)])
    with pytest.raises(
        ScheduleError,
        match=r"1F1 on rank 1 reads 1RECV_F1, which may still run when it starts; list it in deps",
    ):
        verify(bad)


def test_a_transfer_has_ended_for_who_waits_for_it_alone() -> None:
    """On a lane they are in order, so streams know that the first has come with the second; gloo does not."""
    program = smart(exchange_shape(2))
    ops = list(program.ranks[0])
    late = next(i for i, op in enumerate(ops) if op.kind is kinds.C_F and op.step == 0)
    first, second = (
        next(i for i, op in enumerate(ops) if op.kind is kinds.S_F and op.step == s) for s in (0, 1)
    )
    assert ops[late].deps == (first,)
    ops[late] = ops[late]._replace(deps=(second,))
    bad = with_rank(program, 0, ops)
    assert "host: C_F@0 on rank 0 reads" in str(why_broken(bad))
    with pytest.raises(
        ScheduleError, match=r"C_F@0 on rank 0 reads S_F@0, which may still run when it starts"
    ):
        verify(bad)


def test_exact_set_of_actions() -> None:
    program = build("zb-v", 2, 4)
    ops = list(program.ranks[0])
    with pytest.raises(ScheduleError, match=r"F of stage 0, microbatch 0 is computed 0 times"):
        verify(with_rank(program, 0, ops[1:]))
    with pytest.raises(ScheduleError, match=r"is computed 2 times by 0F0, 0F0 instead of 1"):
        verify(with_rank(program, 0, [ops[0], *ops]))
    with pytest.raises(ScheduleError, match=r"dW of stage 0.*computed 2 times"):
        verify(with_rank(program, 0, [*ops, backward(0, 3)._replace(kind=kinds.W)]))
    with pytest.raises(ScheduleError, match=r"1F0 stands on rank 0, but stage 1 lives on rank 1"):
        verify(with_rank(program, 0, [*ops, forward(1, 0)]))
    with pytest.raises(ScheduleError, match=r"9F0 lies outside stages 0..3"):
        verify(with_rank(program, 0, [*ops, forward(9, 0)]))


def test_memory_bound() -> None:
    verify(build("1f1b", 4, 8), memory_limit=4)
    verify(build("1f1b", 4, 8), memory_limit=[4, 3, 2, 1])
    with pytest.raises(
        ScheduleError, match=r"rank 0 holds 8 at its peak, more than the 4 allowed; 0F4 is the first"
    ):
        verify(build("gpipe", 4, 8), memory_limit=4)
    with pytest.raises(ScheduleError, match="2 memory limits were given for 4 ranks"):
        verify(build("1f1b", 4, 8), memory_limit=[4, 4])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "vpp+1", "dualpipev"])
def test_the_proved_order_meets_at_both_ends_and_keeps_every_lane(name: str) -> None:
    """Whoever runs all ranks in it, one op after the other, never waits for what comes later."""
    verified = verify(lower(build(name, 2, 8)))
    orders = [verified.proved_order(rank) for rank in range(2)]
    lists = [[verified.program.ranks[rank][p] for p in order] for rank, order in enumerate(orders)]
    assert [sorted(order) for order in orders] == [list(range(len(ops))) for ops in verified.program.ranks]
    met: list[list[tuple[str, int]]] = []
    for rank, ops in enumerate(lists):
        for lane in {op.lane for op in ops}:
            there = [p for p in orders[rank] if verified.program.ranks[rank][p].lane == lane]
            assert there == sorted(there), "a lane keeps the order of its launches"
        done: set[int] = set()
        for position in orders[rank]:
            assert done.issuperset(verified.program.ranks[rank][position].deps)
            done.add(position)
        met.append([op.comm for op in ops if op.comm is not None])
    assert met[0] == met[1], "both ends come to their transfers in one order"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "vpp+1", "dualpipev"])
def test_the_proved_order_is_that_of_the_program_but_for_early_transfers(name: str) -> None:
    verified = verify(lower(build(name, 2, 8)))
    moved = 0
    for rank, ops in enumerate(verified.program.ranks):
        order = verified.proved_order(rank)
        stays = [position for position in order if ops[position].kind not in kinds.TRANSFERS]
        assert stays == sorted(stays)
        for kind in (kinds.Part.SEND, kinds.Part.RECV):
            later = [at - p for at, p in enumerate(order) if ops[p].kind.part is kind]
            assert min(later) >= -2, "nothing but what fills the gap that a later one leaves"
            moved += sum(gap > 0 for gap in later)
    assert moved, "the program itself launches receives before their senders can send"
    alone = verify(lower(build(name, 1, 4)))
    assert alone.proved_order(0) == list(range(len(alone.program.ranks[0])))
