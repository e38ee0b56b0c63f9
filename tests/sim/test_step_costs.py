"""Costs of a step from sizes: by hand, and how they follow the axes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.cost.hardware import Device, Link
from moeclipse.cost.model import LayerWork
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.launch import BucketShape, HostedLaunch, StepShape
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.engine import simulate
from moeclipse.sim.step_costs import StepCosts, StepWork

DEVICE = Device(
    name="slow", flops=2e6, dtype="fp32", memory_bandwidth=1e9, memory=1e9, processors=1, launch=0.0,
    efficiency=0.5, source="made up",
)  # fmt: skip
LINK = Link(name="string", bandwidth=1e6, latency=0.001, efficiency=1.0, source="made up")
LAYER = LayerWork(
    tokens=10, sequence=10, d_model=4, attn_params=100, attn_width=4, d_ff=8, num_experts=2, top_k=1,
    shared_width=0, row_bytes_per_value=4.0,
)  # fmt: skip
WORK = StepWork(layer=LAYER, dense_width=16, vocab=50)
STAGES = [
    [LayerShape(moe=False, shared=False), LayerShape(shared=False)],
    [LayerShape(shared=False, head=True)],
]


def seconds(work: StepWork, chunks: int = 1) -> dict[tuple[Kind, int, int], float]:
    """By kind, stage and layer."""
    program = expand(build("1f1b", 2, 2), STAGES, Expansion(chunks=chunks, split="layer"), reduce=True)
    durations = StepCosts(work, DEVICE, LINK).durations(verify(program).program)
    found = {}
    for ops, times in zip(program.ranks, durations, strict=True):
        for op, time in zip(ops, times, strict=True):
            key = (op.kind, op.stage or 0, -1 if op.layer is None else op.layer)
            assert found.setdefault(key, time) == time
    return found


def test_products_by_hand() -> None:
    found = seconds(WORK)
    core = 2 * 10 * 10 * 4
    assert found[kinds.ATTN_F, 0, 1] == pytest.approx((2 * 10 * 100 + core) / 1e6)
    assert found[kinds.ATTN_B, 0, 1] == pytest.approx((2 * 10 * 100 + 2 * core) / 1e6)
    assert found[kinds.ATTN_W, 0, 1] == pytest.approx(2 * 10 * 100 / 1e6)
    assert found[kinds.MLP_F, 0, 1] == pytest.approx(6 * 10 * 4 * 8 / 1e6)
    assert found[kinds.MLP_F, 0, 0] == pytest.approx(6 * 10 * 4 * 16 / 1e6), "a dense layer has its own width"
    assert found[kinds.HEAD_F, 1, 0] == pytest.approx(2 * 10 * 4 * 50 / 1e6)
    assert found[kinds.SEND_F, 0, -1] == pytest.approx(0.001 + 10 * 16 / 1e6)
    assert found[kinds.DISPATCH_F, 0, 1] == 0.0, "one rank has all experts"
    assert found[kinds.REDUCE, 0, -1] == 0.0, "and all gradients"


def test_axes_share_work_and_add_communication() -> None:
    alone, cut = seconds(WORK), seconds(replace(WORK, tp=2))
    moved = 0.001 + 10 * 16 / 2 / 1e6
    assert cut[kinds.ATTN_F, 0, 1] == pytest.approx(alone[kinds.ATTN_F, 0, 1] / 2 + 2 * moved)
    assert cut[kinds.ATTN_W, 0, 1] == pytest.approx(alone[kinds.ATTN_W, 0, 1] / 2)
    assert cut[kinds.MLP_F, 0, 1] == pytest.approx(alone[kinds.MLP_F, 0, 1] / 2), "rows travel in dispatch"
    assert cut[kinds.MLP_F, 0, 0] == pytest.approx(alone[kinds.MLP_F, 0, 0] / 2 + 2 * moved)
    assert cut[kinds.SEND_F, 0, -1] == pytest.approx(moved), "each tp rank sends its part to the next stage"
    spread = seconds(replace(WORK, ep=2))
    assert spread[kinds.DISPATCH_F, 0, 1] == pytest.approx(0.001 + 10 * 16 / 2 / 1e6)
    dense = 100 + 3 * 4 * 16 + 100 + 4 * 2
    assert spread[kinds.REDUCE, 0, -1] == pytest.approx(0.001 + 2 * dense * 4 / 2 / 1e6)
    copied = seconds(replace(WORK, dp=2))
    experts = 3 * 4 * 8 * 2
    assert copied[kinds.REDUCE, 0, -1] == pytest.approx(0.002 + (dense + experts) * 4 / 1e6)


def test_a_chunk_takes_its_share() -> None:
    whole, half = seconds(replace(WORK, ep=2)), seconds(replace(WORK, ep=2), chunks=2)
    assert half[kinds.MLP_F, 0, 1] == pytest.approx(whole[kinds.MLP_F, 0, 1] / 2)
    assert half[kinds.DISPATCH_F, 0, 1] == pytest.approx(0.001 + (whole[kinds.DISPATCH_F, 0, 1] - 0.001) / 2)


def test_a_step_is_as_long_as_its_work_where_nothing_overlaps() -> None:
    program = verify(expand(build("gpipe", 1, 2), [STAGES[0]], Expansion(overlap="off")))
    costs = StepCosts(WORK, DEVICE, LINK)
    durations = costs.durations(program.program)
    assert simulate(program, costs.costs(), durations).makespan == pytest.approx(sum(durations[0]))


def whole_step(work: StepWork, tp: int = 1, ep: int = 1) -> dict[str, float]:
    """Seconds of what a whole step adds, by name."""
    launches = (
        HostedLaunch(kinds.SIZES_F, kinds.ROUTE_F, "experts", "sizes"),
        HostedLaunch(kinds.SCORES_F, kinds.DISPATCH_F, "experts", "scores", ahead=True, width=2),
        HostedLaunch(kinds.TENSOR_F, kinds.ATTN_F, "tensor", "gather", ahead=True, width=4),
    )
    layers = [LayerShape(shared=False, launches=launches, head=True)]
    buckets = ((BucketShape("all", "dense_grads", ((0, 0),), False, 4000.0),),)
    step = StepShape(ep=ep, tp=tp, buckets=buckets)
    program = expand(build("1f1b", 1, 1), layers, Expansion(overlap="off"), step=step)
    durations = StepCosts(replace(work, tp=tp, ep=ep), DEVICE, LINK).durations(verify(program).program)
    return {op.kind.name: time for op, time in zip(program.ranks[0], durations[0], strict=True)}


def test_what_travels_in_a_whole_step_by_hand() -> None:
    alone, both = whole_step(WORK), whole_step(WORK, tp=2, ep=2)
    for name in ("SIZES_F", "SCORES_F", "TENSOR_F", "BUCKET_REDUCE", "RESULTS_GATHER"):
        assert alone[name] == 0.0, name
    assert both["SIZES_F"] == pytest.approx(0.001 + 8 * 2 * 3 / 1e6)
    assert both["SCORES_F"] == pytest.approx(0.001 + 10 * 2 * 4 * 3 / 4 / 2 / 1e6)
    assert both["TENSOR_F"] == pytest.approx(0.001 + 10 * 4 * 4 / 2 / 1e6)
    assert both["BUCKET_REDUCE"] == both["BUCKET_GATHER"] == pytest.approx(0.001 + 4000 * 3 / 4 / 1e6)
    assert both["RESULTS_GATHER"] == pytest.approx(0.001)
    assert alone["BUCKET_UPDATE"] == pytest.approx(34 * 1000 / 1e9)
    assert both["BUCKET_UPDATE"] == pytest.approx(alone["BUCKET_UPDATE"] / 4)
    assert both["ATTN_F"] == pytest.approx(alone["ATTN_F"] / 2), "gathers are ops of their own"
