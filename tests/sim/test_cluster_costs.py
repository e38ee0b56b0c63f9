"""Ops on a cluster: the parts of a layer as `plan` prices them, and each axis over its own link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.cluster import ExpertChoice, cluster
from moeclipse.cost.hardware import Link
from moeclipse.cost.kernels import MEASURED_ON_HOPPER
from moeclipse.cost.layer_seconds import UPDATE_BYTES, MicrobatchWork
from moeclipse.cost.sizes import ModelSizes
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.launch import BucketShape, HostedLaunch, StepShape
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.cluster_costs import ClusterCosts

MODEL = ModelSizes(
    vocab=5000, d_model=512, num_heads=8, kv_heads=4, d_qk=64, d_v=64, moe_layers=(False, True),
    windows=(0, 64), dense_width=1024, expert_width=256, shared_width=128,
    experts=ExpertChoice(num_experts=16, top_k=4),
)  # fmt: skip
SLOW = Link(name="slow", bandwidth=1e9, latency=1e-3, efficiency=1.0, source="made up")
INSIDE = MEASURED_ON_HOPPER.inside
MACHINE = replace(cluster("h100"), gpus_per_node=4, far=SLOW)
LAUNCHES = (
    HostedLaunch(kinds.SIZES_F, kinds.ROUTE_F, "experts", "sizes"),
    HostedLaunch(kinds.TENSOR_F, kinds.ATTN_F, "tensor", "gather", ahead=True, width=512),
)
BUCKETS = (
    (BucketShape("dense", "dense_grads", ((0, 0),), False, 4e6),),
    (BucketShape("experts", "replicas", ((1, 0),), False, 8e6),),
)


def priced(dp: int = 1, ep: int = 1, tp: int = 1, chunks: int = 1) -> tuple[ClusterCosts, Program]:
    work = MicrobatchWork(model=MODEL, cluster=MACHINE, tokens=4096, sequence=1024, tp=tp, ep=ep)
    stages = [
        [LayerShape(moe=False, shared=False)],
        [LayerShape(recompute="mlp", head=True, launches=LAUNCHES)],
    ]
    step = StepShape(dp=dp, ep=ep, tp=tp, buckets=BUCKETS)
    how = Expansion(overlap="pair+self" if chunks > 1 else "off", chunks=chunks, split="layer")
    program = verify(expand(build("1f1b", 2, 2), stages, how, step=step)).program
    return ClusterCosts(work), program


def seconds(**axes: int) -> dict[tuple[str, int], float]:
    costs, program = priced(**axes)
    found: dict[tuple[str, int], float] = {}
    for ops, row in zip(program.ranks, costs.durations(program), strict=True):
        for op, time in zip(ops, row, strict=True):
            key = (op.kind.name, op.stage or 0)
            assert found.setdefault(key, time) == time, op
    return found


def test_parts_are_those_of_a_plan() -> None:
    costs, _ = priced(ep=8)
    work, found = costs.work, seconds(ep=8)
    assert found["ATTN_F", 0] == pytest.approx(INSIDE * work.attention(0).F)
    assert found["ATTN_B", 1] == pytest.approx(INSIDE * work.attention(1).B)
    assert found["ATTN_F", 1] < found["ATTN_F", 0], "a layer with a window sees fewer keys"
    assert found["MLP_F", 0] == pytest.approx(INSIDE * work.dense().F)
    assert found["MLP_W", 1] == pytest.approx(INSIDE * work.experts().W)
    assert found["MLP_R", 1] == pytest.approx(2 / 3 * found["MLP_F", 1]), "the last of three products"
    assert found["HEAD_F", 1] == pytest.approx(INSIDE * work.head().F)
    assert found["DISPATCH_F", 1] == found["COMBINE_B", 1] == pytest.approx(work.dispatch())
    assert found["BUCKET_UPDATE", 0] == pytest.approx(work.kernels.stream(UPDATE_BYTES * 1e6 / 8))


def test_every_axis_takes_the_link_that_it_crosses() -> None:
    near, far = seconds(ep=4), seconds(ep=8)
    assert near["DISPATCH_F", 1] < 1e-3 < far["DISPATCH_F", 1], "eight ranks lie on two nodes"
    assert near["SEND_F", 0] > 1e-3, "the next stage is on the next node"
    assert seconds(ep=2)["SEND_F", 0] < 1e-3
    inside, apart = seconds(dp=4), seconds(dp=4, ep=4)
    assert inside["BUCKET_REDUCE", 1] < 1e-3 < apart["BUCKET_REDUCE", 1], "replicas lie ep ranks apart"
    assert seconds(dp=1, ep=4)["BUCKET_REDUCE", 1] == 0.0, "nobody else has these experts"
    assert apart["BUCKET_GATHER", 1] == pytest.approx(MACHINE.collective(8e6 / 2, 4, 4)), (
        "weights come back in half of the bytes"
    )
    cut = seconds(tp=4)
    assert cut["TENSOR_F", 1] == pytest.approx(MACHINE.collective(4096 * 512 * 2.0, 4))
    assert cut["ATTN_F", 0] < seconds()["ATTN_F", 0], "gathers are ops of their own"


def test_a_chunk_takes_the_time_of_its_rows() -> None:
    work = priced(ep=4)[0].work
    half = replace(work, tokens=2048)
    costs, program = priced(ep=4, chunks=2)
    found = {
        (op.kind.name, op.chunks): time
        for ops, row in zip(program.ranks, costs.durations(program), strict=True)
        for op, time in zip(ops, row, strict=True)
    }
    assert found["DISPATCH_F", 2] == pytest.approx(half.dispatch())
    assert found["ROUTE_F", 2] == pytest.approx(INSIDE * half.route().F)


def test_the_host_takes_its_time_for_a_layer() -> None:
    costs, program = priced(ep=4)
    found = costs.costs(program)
    of_layers = sum(op.layer is not None for ops in program.ranks for op in ops)
    assert found.launch * of_layers == pytest.approx(costs.software.host_s * 2 * 2)
    assert found.contention == {("compute", "a2a"): pytest.approx(1 - 20 / 132)}
    assert found.name == "h100, 4 a node over nvlink4, slow between nodes"


def test_a_step_is_needed() -> None:
    costs, _ = priced()
    with pytest.raises(ScheduleError, match="a cluster prices whole steps"):
        costs.durations(expand(build("1f1b", 1, 1), [LayerShape()], Expansion()))
