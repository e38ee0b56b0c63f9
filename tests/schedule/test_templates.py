"""Layer ops of an action: the right ones, in an order that hides what it claims to hide."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import DEEPSEEK_V3, Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Form, Part
from moeclipse.schedule.legal import broken_rules
from moeclipse.schedule.needs import needs
from moeclipse.schedule.op import Program, backward, forward, overlap_alone, pair, pipeline_program
from moeclipse.schedule.shape import RECOMPUTED, LayerShape, StagePlacement
from moeclipse.schedule.templates import Expansion, expand, replicate
from moeclipse.sim.engine import Simulation, simulate
from moeclipse.sim.measure import summarise

PARTS = ("ATTN", "ROUTE", "SHARED", "MLP")
EVEN = Costs(
    seconds={f"{p}_{f}": 1.0 for p in PARTS for f in "FBW"}
    | {f"{p}_{f}": 1.0 for p in ("DISPATCH", "COMBINE") for f in "FB"}
    | {f"ROUTE_{f}": 0.0 for f in "FBW"}
)
LONG = replace(EVEN, seconds=EVEN.seconds | {f"{p}_{f}": 1.5 for p in ("DISPATCH", "COMBINE") for f in "FB"})


def one_rank(*actions: object, microbatches: int = 2) -> Program:
    return pipeline_program("one", [actions], StagePlacement.loop(1), microbatches)  # type: ignore[list-item]


def pair_between() -> Program:
    return one_rank(forward(0, 0), pair(forward(0, 1), backward(0, 0)), backward(0, 1))


def spans(result: Simulation, wanted: str, microbatch: int) -> list[tuple[float, float]]:
    return [
        (float(result.start[i]), float(result.finish[i]))
        for i, op in enumerate(result.program.ranks[0])
        if op.kind.name == wanted and op.microbatch == microbatch
    ]


def under(result: Simulation, hidden: str, hider: str, of: tuple[int, int]) -> bool:
    """Each `hidden` of one microbatch meets a `hider` of the other in time."""
    covers = spans(result, hider, of[1])
    return all(
        any(min(end, stop) > max(begin, start) for start, stop in covers)
        for begin, end in spans(result, hidden, of[0])
    )


def test_every_schedule_expands_and_verifies() -> None:
    layers = [LayerShape(), LayerShape(moe=False), LayerShape(shared=False)]
    for name in (
        "gpipe",
        "1f1b",
        "1f1b-pairs",
        "pp1",
        "vpp",
        "vpp+1",
        "zb-h1",
        "zb-v",
        "dualpipe",
        "dualpipev",
    ):
        P = 1 if name == "pp1" else 4
        V = 2 if broken_rules(name, P, 8, 1) or name.startswith("vpp") else 1
        for overlap in ("off", "pair", "pair+self"):
            verify(expand(build(name, P, 8, V), layers, Expansion(overlap=overlap, chunks=2, split="layer")))


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("split", ["moe", "layer"])
def test_recompute_goes_with_every_overlap(recompute: str, shared: bool, chunks: int, split: str) -> None:
    layers = [
        LayerShape(recompute=recompute, shared=shared),
        LayerShape(moe=False, recompute=recompute),
        LayerShape(),
    ]
    for name, overlap in itertools.product(("dualpipev", "vpp+1", "zb-v"), ("off", "pair", "pair+self")):
        program = expand(
            build(name, 2, 4), layers, Expansion(overlap=overlap, chunks=chunks, split=split), reduce=True
        )
        verify(program)
        again = {op.kind.part for ops in program.ranks for op in ops if op.kind.form is Form.R}
        expected = set(RECOMPUTED[recompute]) - (set() if shared else {Part.SHARED})
        assert again == expected


def test_recompute_lowers_memory() -> None:
    peaks = {}
    for recompute in RECOMPUTED:
        program = expand(build("vpp+1", 4, 8), [LayerShape(recompute=recompute)] * 2, Expansion())
        peaks[recompute] = max(verify(program).peak)
    assert peaks["full"] < 0.4 * peaks["off"]
    assert peaks["full"] < peaks["mlp"] < peaks["off"]
    assert peaks["attn"] < peaks["off"]


def test_memory_returns_to_zero() -> None:
    for recompute in RECOMPUTED:
        layers = [LayerShape(recompute=recompute), LayerShape(moe=False, recompute=recompute)]
        program = expand(build("dualpipev", 2, 4), layers, Expansion(chunks=3, split="layer"))
        for ops in program.ranks:
            assert sum(op.alloc - op.free for op in ops) == pytest.approx(0.0)


def test_pair_hides_what_the_table_says() -> None:
    """Each line of the table in the module's docstring, in time."""
    result = simulate(expand(pair_between(), [LayerShape(shared=False)] * 3, Expansion(overlap="pair")), LONG)
    F, B = 1, 0
    assert under(result, "COMBINE_B", "ATTN_F", (B, F))
    assert under(result, "DISPATCH_F", "MLP_B", (F, B))
    assert under(result, "DISPATCH_B", "MLP_W", (B, B))
    assert under(result, "DISPATCH_B", "MLP_F", (B, F))
    assert under(result, "COMBINE_F", "ATTN_B", (F, B))


def launched(program: Program) -> list[str]:
    """Layer and microbatch of each op of the one rank: the order in which the host launches them."""
    return [f"{op.kind}@{op.layer}.{op.microbatch}" for op in program.ranks[0]]


PAIR = """
COMBINE_B@1.0  ATTN_F@0.1 SHARED_B@1.0 ROUTE_F@0.1
DISPATCH_F@0.1 MLP_B@1.0
DISPATCH_B@1.0 MLP_W@1.0 SHARED_F@0.1 MLP_F@0.1
COMBINE_F@0.1  ROUTE_B@1.0 ATTN_B@1.0 COMBINE_B@0.0 SHARED_W@1.0 ROUTE_W@1.0 ATTN_W@1.0
               ATTN_F@1.1 SHARED_B@0.0 ROUTE_F@1.1
DISPATCH_F@1.1 MLP_B@0.0
DISPATCH_B@0.0 MLP_W@0.0 SHARED_F@1.1 MLP_F@1.1
COMBINE_F@1.1  ROUTE_B@0.0 ATTN_B@0.0 SHARED_W@0.0 ROUTE_W@0.0 ATTN_W@0.0
"""


def test_a_pair_is_launched_in_the_order_of_the_table() -> None:
    """Where compute runs inline, an exchange that is launched behind a product does not hide under it.

    A simulation of streams cannot tell: there both orders take the same time.
    """
    launches = launched(expand(pair_between(), [LayerShape()] * 2, Expansion(overlap="pair")))
    pair = launches[launches.index("COMBINE_B@1.0") : launches.index("COMBINE_B@1.1")]
    assert pair == PAIR.split()


ALONE = """
ATTN_F@0.0 ROUTE_F@0.0 DISPATCH_F@0.0 SHARED_F@0.0 MLP_F@0.0 COMBINE_F@0.0
ATTN_F@1.0 ROUTE_F@1.0 DISPATCH_F@1.0 SHARED_F@1.0 MLP_F@1.0 COMBINE_F@1.0 HEAD_F@1.0
HEAD_B@1.0 COMBINE_B@1.0 HEAD_W@1.0 SHARED_B@1.0
MLP_B@1.0  DISPATCH_B@1.0 MLP_W@1.0 SHARED_W@1.0 ROUTE_B@1.0 ATTN_B@1.0
           COMBINE_B@0.0  ROUTE_W@1.0 ATTN_W@1.0 SHARED_B@0.0
MLP_B@0.0  DISPATCH_B@0.0 MLP_W@0.0 SHARED_W@0.0 ROUTE_B@0.0 ATTN_B@0.0 ROUTE_W@0.0 ATTN_W@0.0
"""


def test_an_action_alone_is_launched_in_the_order_of_the_table() -> None:
    program = one_rank(forward(0, 0), backward(0, 0), microbatches=1)
    launches = launched(
        expand(program, [LayerShape(), LayerShape(head=True)], Expansion(overlap="pair+self"))
    )
    assert launches == ALONE.split()


def test_self_overlap_hides_what_the_table_says() -> None:
    program = expand(one_rank(forward(0, 0), backward(0, 0), microbatches=1), [LayerShape()] * 3, Expansion())
    result = simulate(program, LONG)
    assert under(result, "DISPATCH_F", "SHARED_F", (0, 0))
    assert under(result, "COMBINE_B", "SHARED_B", (0, 0))
    assert under(result, "DISPATCH_B", "MLP_W", (0, 0))


def test_the_last_attention_weight_gradient_hides_transfers() -> None:
    program = expand(build("dualpipev", 4, 10), [LayerShape(shared=False)] * 2, Expansion())
    for ops in program.ranks:
        for i, op in enumerate(ops):
            if op.kind is kinds.SEND_B:
                later = [o for o in ops[i + 1 : i + 4] if o.kind is kinds.ATTN_W]
                split = [
                    o
                    for o in ops[max(0, i - 14) : i]
                    if o.kind.form is Form.W and o.microbatch == op.microbatch
                ]
                assert later or not split, f"{op} stands behind its dW"


def test_serial_overlaps_nothing() -> None:
    result = simulate(expand(build("vpp+1", 4, 8), [LayerShape()] * 2, Expansion(overlap="off")), EVEN)
    exchange = summarise(result).communication(Part.DISPATCH, Part.COMBINE)
    assert exchange.hidden == pytest.approx(0.0)
    alone = simulate(expand(pair_between(), [LayerShape()] * 2, Expansion(overlap="off")), EVEN)
    assert alone.makespan == pytest.approx(sum(_work(alone)))


def _work(result: Simulation) -> list[float]:
    return [float(f - s) for s, f in zip(result.start, result.finish, strict=True)]


def test_finer_overlap_never_costs_time() -> None:
    spent = {}
    for overlap, chunks, split in (
        ("off", 1, "moe"),
        ("pair", 1, "moe"),
        ("pair+self", 1, "moe"),
        ("pair+self", 2, "moe"),
        ("pair+self", 2, "layer"),
    ):
        expansion = Expansion(overlap=overlap, chunks=chunks, split=split)
        program = expand(build("dualpipev", 4, 12), [LayerShape(shared=False)] * 2, expansion)
        summary = summarise(simulate(program, DEEPSEEK_V3))
        exchange = summary.communication(Part.DISPATCH, Part.COMBINE)
        spent[overlap, chunks, split] = (summary.makespan, exchange.hidden / exchange.total)
    makespans = [value[0] for value in spent.values()]
    assert makespans == sorted(makespans, reverse=True)
    assert spent["off", 1, "moe"][0] / spent["pair+self", 2, "layer"][0] > 1.5
    assert spent["pair+self", 2, "layer"][1] > 0.85


def test_deepseek_pair_is_predicted_within_three_percent() -> None:
    """The published pair of four layers took 129.0 ms."""
    result = simulate(
        expand(pair_between(), [LayerShape(shared=False)] * 4, Expansion(overlap="pair")), DEEPSEEK_V3
    )
    chosen = [
        i
        for i, op in enumerate(result.program.ranks[0])
        if op.microbatch == (1 if op.kind.form is Form.F else 0)
    ]
    span = result.finish[chosen].max() - result.start[chosen].min()
    assert span == pytest.approx(0.1290, rel=0.03)


def test_uneven_stages_pair_and_the_rest_runs_alone() -> None:
    layers = [[LayerShape()] * 1, [LayerShape()] * 3, [LayerShape(moe=False)] * 2, [LayerShape()] * 2]
    for overlap in ("off", "pair", "pair+self"):
        verify(expand(build("dualpipev", 2, 6), layers, Expansion(overlap=overlap)))
    with pytest.raises(ScheduleError, match="each of the 4 stages, but has \\[1, 1\\]"):
        expand(build("dualpipev", 2, 6), [[LayerShape()], [LayerShape()]])


def test_copies_meet_in_their_expert_group() -> None:
    program = replicate(expand(build("vpp+1", 2, 4), [LayerShape()]), 3)
    verified = verify(program)
    assert program.num_ranks == 6
    assert program.groups["ep1"] == (3, 4, 5)
    slow = Costs(seconds=EVEN.seconds, rank_speed=(1.0, 1.0, 0.5, 1.0, 1.0, 1.0))
    summary = summarise(simulate(verified, slow))
    assert summary.ranks[0].straggle > 0
    assert summary.ranks[2].straggle == pytest.approx(0.0)


def test_self_marks_single_actions() -> None:
    program = overlap_alone(build("dualpipev", 2, 4))
    assert str(program.ranks[0][0]) == "(0F0)"
    marked = expand(program, [LayerShape()], Expansion(overlap="pair"))
    everything = expand(build("dualpipev", 2, 4), [LayerShape()], Expansion(overlap="pair+self"))
    assert marked.ranks == everything.ranks


def test_bad_expansions_are_refused() -> None:
    with pytest.raises(ScheduleError, match="must be 'off', 'pair' or 'pair\\+self'"):
        Expansion(overlap="all")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="chunks \\(0\\)"):
        Expansion(chunks=0)
    with pytest.raises(ScheduleError, match="lowered already"):
        expand(expand(build("1f1b", 2, 2), [LayerShape()]), [LayerShape()])
    with pytest.raises(ScheduleError, match="recompute \\('some'\\)"):
        LayerShape(recompute="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("split", ["moe", "layer"])
def test_the_head_is_the_end_of_forward_and_the_start_of_backward(moe: bool, split: str) -> None:
    last = LayerShape(moe=moe, head=True, activation=replace(LayerShape().activation, head=2.0))
    for name in ("pp1", "1f1b", "1f1b-pairs", "vpp+1", "zb-h1", "zb-v", "dualpipev"):
        P = 1 if name == "pp1" else 2
        program = build(name, P, 4)
        stages = program.pipeline().placement.num_stages
        layers = [[LayerShape(), LayerShape()]] * (stages - 1) + [[LayerShape(), last]]
        for overlap in ("off", "pair", "pair+self"):
            expanded = expand(program, layers, Expansion(overlap=overlap, chunks=2, split=split))
            verify(expanded)
            for ops in expanded.ranks:
                assert sum(op.alloc - op.free for op in ops) == pytest.approx(0.0)
            heads = [op for ops in expanded.ranks for op in ops if op.kind is kinds.HEAD_F]
            assert {(op.stage, op.layer) for op in heads} == {(stages - 1, 1)}
            order = {
                (op.kind, op.layer, op.microbatch): i for ops in expanded.ranks for i, op in enumerate(ops)
            }
            for op in heads:
                done = kinds.COMBINE_F if moe else kinds.MLP_F
                assert (done, op.stage, 1, op.microbatch) in needs(expanded.pipeline(), op)
                first = kinds.COMBINE_B if moe else kinds.MLP_B
                assert order[kinds.HEAD_B, 1, op.microbatch] < order[first, 1, op.microbatch]
