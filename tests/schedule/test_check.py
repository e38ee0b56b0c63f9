"""The verifier catches what would deadlock, race or compute something twice, and names the ops."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import Op, Program, backward, forward, pair, pipeline_program
from moeclipse.schedule.shape import LayerShape, PipelineShape, StagePlacement
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand, replicate


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


def with_rank(program: Program, rank: int, ops: list[Op]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = tuple(ops)
    return replace(program, ranks=tuple(ranks))


def swapped(ops: list[Op], i: int, j: int) -> list[Op]:
    """Two ops change places; deps follow what they meant."""
    moved = {i: j, j: i}
    out = list(ops)
    out[i], out[j] = out[j], out[i]
    return [op._replace(deps=tuple(sorted(moved.get(d, d) for d in op.deps))) for op in out]


def without(ops: list[Op], i: int) -> list[Op]:
    kept = [op for position, op in enumerate(ops) if position != i]
    return [op._replace(deps=tuple(d - (d > i) for d in op.deps if d != i)) for op in kept]


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


@pytest.mark.parametrize(
    ("name", "rank", "first", "second"),
    [
        ("zb-v", 2, "2F0", "3F0"),  # neighbours on the rank of the fold, forward
        ("zb-v", 2, "3I0", "2I0"),  # and backward
        ("dualpipev", 2, "3B1", "2B1"),
        ("zb-v", 0, "0I1", "0W1"),  # dX before its dW
        ("zb-h1", 1, "1I0", "1W0"),
        ("zb-v", 1, "1F0", "1I0"),
    ],
)
def test_swapping_what_one_rank_makes_and_reads_is_caught(
    name: str, rank: int, first: str, second: str
) -> None:
    program = build(name, 3, 6)
    ops = list(program.ranks[rank])

    def find(text: str) -> int:
        return next(i for i, op in enumerate(ops) if text in map(str, op.leaves))

    i, j = find(first), find(second)
    assert i < j
    if ops[i].kind is kinds.PAIR or ops[j].kind is kinds.PAIR:
        ops = [leaf for op in ops for leaf in op.leaves]
        i, j = find(first), find(second)
    with pytest.raises(ScheduleError, match="circle") as caught:
        verify(with_rank(program, rank, swapped(ops, i, j)))
    assert first in str(caught.value)


def lower_swapped(program: Program, rank: int, m: int) -> Program:
    lowered = lower(program)
    ops = list(lowered.ranks[rank])
    i = next(k for k, op in enumerate(ops) if str(op) == f"{rank}F{m}")
    j = next(k for k, op in enumerate(ops) if str(op) == f"{rank}B{m}")
    return with_rank(lowered, rank, swapped(ops, i, j))


def test_a_cycle_is_told_op_by_op() -> None:
    """Rank 0 wants the gradient of microbatch 1 before it has sent microbatch 1."""
    ranks = [
        [forward(0, 0), backward(0, 1), forward(0, 1), backward(0, 0)],
        [forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1)],
    ]
    with pytest.raises(ScheduleError) as caught:
        verify(pipeline_program("bad", ranks, StagePlacement.loop(2), 2))
    assert "0B1 on rank 0 needs" in str(caught.value)
    assert "0F1 on rank 0 waits on its lane for 0B1 on rank 0" in str(caught.value)


def test_crossed_microbatches_between_ranks_are_caught() -> None:
    ranks = [[forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)]]
    ranks += [[forward(1, 0), backward(1, 0), backward(1, 1), forward(1, 1)]]
    with pytest.raises(ScheduleError, match="circle"):
        verify(pipeline_program("crossed", ranks, StagePlacement.loop(2), 2))


@pytest.mark.parametrize("kind", ["SEND_F", "SEND_B", "RECV_F", "RECV_B"])
def test_dropping_a_transfer_is_caught(kind: str) -> None:
    lowered = lower(build("dualpipev", 4, 8))
    for rank, ops in enumerate(lowered.ranks):
        positions = [i for i, op in enumerate(ops) if op.kind.name == kind]
        for i in positions[:: max(1, len(positions) // 3)]:
            bad = with_rank(lowered, rank, without(list(ops), i))
            with pytest.raises(ScheduleError, match=rf"rank {rank} lacks {ops[i]}"):
                verify(bad)


def test_an_unmatched_send_is_caught_by_the_matching_itself() -> None:
    """Where the set of ops cannot tell (here it is not asked), the communicator does."""
    from moeclipse.schedule.op_graph import match

    lowered = lower(build("1f1b", 2, 3))
    ops = list(lowered.ranks[0])
    i = next(k for k, op in enumerate(ops) if op.kind is kinds.SEND_F and op.microbatch == 2)
    with pytest.raises(
        ScheduleError, match=r"1RECV_F2 on rank 1 meets nothing, because rank 0 launches only 2"
    ):
        match(with_rank(lowered, 0, without(ops, i)))


def test_reversing_two_collectives_on_one_rank_is_caught() -> None:
    program = smart(exchange_shape(4, group_size=2))
    ops = list(program.ranks[1])
    bad = with_rank(program, 1, swapped(ops, 0, 1))
    with pytest.raises(ScheduleError) as caught:
        verify(bad)
    message = str(caught.value)
    assert "S_F@0 on rank 0" in message
    assert "S_F@1" in message
    assert "rank 1" in message
    # Renumbering does not help: the members still say different things.
    renumbered = [op._replace(comm=("ep", k)) if k < 2 else op for k, op in enumerate(swapped(ops, 0, 1))]
    with pytest.raises(ScheduleError, match="same ops in the same order"):
        verify(with_rank(program, 1, renumbered))


def test_wrong_numbers_on_a_communicator_are_caught() -> None:
    program = smart(exchange_shape(3))
    ops = [op._replace(comm=("ep", 7)) if k == 1 else op for k, op in enumerate(program.ranks[2])]
    with pytest.raises(
        ScheduleError, match=r"op number 1 is S_F@1 on rank 0 but S_F@1 \(numbered 7\) on rank 2"
    ):
        verify(with_rank(program, 2, ops))
    alone = expand(build("pp1", 1, 2), [LayerShape()])
    ops = [op._replace(comm=("ep0", 9)) if op.kind is kinds.COMBINE_B else op for op in alone.ranks[0]]
    with pytest.raises(ScheduleError, match=r"of rank 0 is 0.0COMBINE_B0, numbered \('ep0', 9\)"):
        verify(with_rank(alone, 0, ops))


def test_reversed_exchanges_of_a_pipeline_are_caught() -> None:
    program = replicate(expand(build("vpp+1", 2, 4), [LayerShape()] * 2, Expansion()), 2)
    verify(program)
    ops = list(program.ranks[1])
    a2a = [i for i, op in enumerate(ops) if op.lane == "a2a"]
    bad = with_rank(program, 1, swapped(ops, a2a[4], a2a[5]))
    with pytest.raises(ScheduleError, match=r"same ops in the same order|not launched before"):
        verify(bad)


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


def test_a_receive_in_front_of_a_send_on_one_lane_deadlocks() -> None:
    """Two directions on one communicator: each side waits in its receive for the other's send."""
    good = lower(build("1f1b", 2, 1))
    verify(good)
    shared = [tuple(op._replace(lane="p2p:both") if op.comm else op for op in ops) for ops in good.ranks]
    ops = list(shared[0])
    send = next(i for i, op in enumerate(ops) if op.kind is kinds.SEND_F)
    receive = next(i for i, op in enumerate(ops) if op.kind is kinds.RECV_B)
    if send < receive:
        ops = swapped(ops, send, receive)
    with pytest.raises(ScheduleError, match="0SEND_F0 on rank 0 waits on its lane for 0RECV_B0"):
        verify(replace(good, ranks=(tuple(ops), shared[1])))
    # With a lane per direction the same launch order runs.
    order = [op._replace(lane=f"p2p:{op.comm[0]}") if op.comm else op for op in ops]
    verify(replace(good, ranks=(tuple(order), good.ranks[1])))


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


def test_exact_set_of_layer_ops() -> None:
    program = expand(build("1f1b", 2, 2), [LayerShape(recompute="full")], Expansion(chunks=2))
    verify(program)
    for kind in (kinds.MLP_F, kinds.ROUTE_W, kinds.DISPATCH_R, kinds.COMBINE_B, kinds.ATTN_B):
        ops = list(program.ranks[0])
        i = next(k for k, op in enumerate(ops) if op.kind is kind)
        with pytest.raises(ScheduleError, match=kind.name):
            verify(with_rank(program, 0, without(ops, i)))
    ops = list(program.ranks[0])
    with pytest.raises(ScheduleError, match="expected it once, or once for every chunk"):
        verify(with_rank(program, 0, [*ops, next(op for op in ops if op.kind is kinds.ATTN_W)]))


def test_memory_bound() -> None:
    verify(build("1f1b", 4, 8), memory_limit=4)
    verify(build("1f1b", 4, 8), memory_limit=[4, 3, 2, 1])
    with pytest.raises(
        ScheduleError, match=r"rank 0 holds 8 at its peak, more than the 4 allowed; 0F4 is the first"
    ):
        verify(build("gpipe", 4, 8), memory_limit=4)
    with pytest.raises(ScheduleError, match="2 memory limits were given for 4 ranks"):
        verify(build("1f1b", 4, 8), memory_limit=[4, 4])


def test_groups_must_be_known() -> None:
    lowered = lower(build("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match=r"group '0>1' has no members listed"):
        verify(replace(lowered, groups={"1>0": (1, 0)}))
    with pytest.raises(ScheduleError, match=r"uses group '0>1', whose members are \[0, 5\]"):
        verify(replace(lowered, groups={**lowered.groups, "0>1": (0, 5)}))
    assert isinstance(lowered.shape, PipelineShape)


def test_one_sided_peers_are_refused() -> None:
    program = smart(exchange_shape(4))
    ops = list(program.ranks[2])
    ops[1] = ops[1]._replace(peers=(1, 2))
    with pytest.raises(ScheduleError, match="exchanges with rank 2, but not the reverse"):
        verify(with_rank(program, 2, ops))
