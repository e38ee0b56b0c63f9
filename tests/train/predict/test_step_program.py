"""A step launches its program: every lane is watched in layouts of all kinds, torch's calls are counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_learner import configure

from moeclipse.comm.async_ops.lane import Ready, gather
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ScheduleError
from moeclipse.model.launches import LayerLaunches
from moeclipse.pipeline.overlap import lay_out
from moeclipse.schedule import kinds
from moeclipse.schedule.check import verify
from moeclipse.schedule.launch import HostedLaunch
from moeclipse.schedule.templates import replicate
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.step_program import shapes_of_run
from moeclipse.train.step.learner import Learner

STEPS = 2
BASE: dict[str, Any] = {
    "parallel.peer": "off",
    "optim.accumulate": 2,
    "data.batch_size": 8,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "moe.num_experts": 8,
    "gate.balance_loss": 0.05,
}
SMART: dict[str, Any] = {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2}
LATENT: dict[str, Any] = {
    "model.attention": "mla",
    "model.kv_lora_rank": 8,
    "model.q_lora_rank": 8,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 8,
}
MOVES: dict[str, Any] = {
    "placement.slots_per_rank": 5,
    "placement.planner": "greedy",
    "placement.start_step": 1,
    "placement.every": 1,
    "run.steps": 8,
}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "ep": (2, {}, {"gate.capacity_factor": 0.8}),
    "dp x ep": (4, {"dp": 2}, {"optim.accumulate": 1}),
    "pp x ep": (
        4,
        {"pp": 2},
        {"pipeline.schedule": "dualpipev", "pipeline.overlap": "pair", "optim.accumulate": 4},
    ),
    "two directions": (
        4,
        {"pp": 2, "mirrored": True},
        {"pipeline.schedule": "dualpipe", "pipeline.overlap": "pair", "optim.accumulate": 4},
    ),
    "pp, tied": (2, {"pp": 2}, {"model.tie_embeddings": True, "pipeline.schedule": "zb-h1"}),
    "tp": (2, {"tp": 2}, {"model.num_dense_layers": 1, "model.qk_norm": "whole"}),
    "tp, tokens whole": (2, {"tp": 2}, {"parallel.sequence_parallel": False, **LATENT}),
    "tp x pp, sharded": (
        4,
        {"tp": 2, "pp": 2},
        {"moe.expert_tp": "sharded", "pipeline.schedule": "1f1b", "pipeline.recompute": "full", **LATENT},
    ),
    "pairs of chunks": (2, {}, {"pipeline.overlap": "pair+self", "pipeline.recompute": "moe"}),
    "smart": (2, {}, {"pipeline.overlap": "pair+self", **SMART}),
    "shadows": (2, {}, {**SMART, "moe.shadow": (0, 2)}),
    "shadows in a pipeline": (2, {}, {"pipeline.overlap": "pair", "moe.shadow": (0, 2)}),
    "migration": (2, {}, MOVES),
    "migration amid chunks": (2, {}, {"pipeline.overlap": "pair+self", **MOVES}),
    "costs and trials": (2, {}, {"moe.schedule": "smart", "moe.shadow": "auto", "run.steps": 12}),
    "peer memory": (
        2,
        {"tp": 2},
        {"parallel.peer": "on", "moe.transport": "peer", "pipeline.schedule": "1f1b"},
    ),
}
CALLS = (
    "all_to_all_single",
    "all_reduce",
    "isend",
    "irecv",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:4000])
    return str(path)


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Calls of torch.distributed, whoever makes them."""
    real = {name: getattr(dist, name) for name in CALLS}

    def counting(name: str) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            calls[name] += 1
            return real[name](*given, **more)

        return call

    for name in CALLS:
        setattr(dist, name, counting(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def train(mesh: Mesh, config: TrainConfig) -> dict[str, Any]:
    """Steps under a ledger: how much it saw, and whether torch was called for anything else."""
    learner, calls = Learner(config, mesh), Counter[str]()
    ledger = mesh.recorder.ledger
    assert ledger is not None
    with counted(calls):
        for step in range(STEPS + (config.placement.planner != "static")):
            learner.step(step)
    return {
        "checked": ledger.checked,
        "between": dict(ledger.between),
        "calls": sum(calls.values()),
        "listed": len(ledger._listed),
    }


LEARNED = ("costs of an exchange", "trials of granularities")
APART = ("times of a step", "between two steps", "integrity", *LEARNED)
"""What is no part of a step: it is launched inside `apart`, and belongs to no program."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_launches_its_program_and_nothing_else(corpus: str, layout: str) -> None:
    ranks, axes, changes = LAYOUTS[layout]
    for found in run_ranks(ranks, train, configure(corpus, **{**BASE, **changes}), **axes):
        assert found["checked"] > found["listed"] // 2 > 0
        assert set(found["between"]) <= set(APART)
        assert ("between two steps" in found["between"]) is layout.startswith("migration")
        assert set(LEARNED[:1]) & set(found["between"]) == (set(LEARNED[:1]) if "costs" in layout else set())
        if layout != "peer memory":  # what ranks read in each other's memory is no call
            assert found["calls"] == found["checked"] + sum(found["between"].values())


def verified_for_all(mesh: Mesh, config: TrainConfig) -> int:
    """Ranks of the program of all copies, after its proof."""
    return verify(replicate(Learner(config, mesh).program().program)).program.num_ranks


@pytest.mark.parametrize("layout", ["dp x ep", "pp x ep", "two directions", "tp x pp, sharded", "smart"])
def test_the_program_is_proved_for_all_copies(corpus: str, layout: str) -> None:
    ranks, axes, changes = LAYOUTS[layout]
    found = run_ranks(ranks, verified_for_all, configure(corpus, **{**BASE, **changes}), **axes)
    assert found == [ranks] * ranks


def fails(mesh: Mesh, config: TrainConfig, how: str) -> str:
    """What is said of a step that is broken in one way, on every rank alike."""
    if how == "one op less in the program":
        routing = LayerLaunches._routing

        def without_sizes(self: LayerLaunches, layer: int) -> list[HostedLaunch]:
            return [launch for launch in routing(self, layer) if launch.kind is not kinds.SIZES_F]

        LayerLaunches._routing = without_sizes  # type: ignore[method-assign, assignment]
    learner = Learner(config, mesh)
    if how == "one launch more":
        model = learner.model.forward

        def with_another(*given: Any) -> Any:
            gather(mesh.a2a, mesh.experts, torch.ones(1), "somebody asks").get()
            return model(*given)

        learner.model.forward = with_another  # type: ignore[method-assign]
    elif how == "one launch less":
        bucket = next(bucket for bucket in learner.buckets if bucket.group.size > 1)
        bucket.publish = lambda: Ready(bucket.params)  # type: ignore[method-assign]
    elif how == "two buckets in another order":
        first, second = [bucket for bucket in learner.buckets if bucket.group.size > 1][:2]
        first.publish, second.publish = second.publish, first.publish  # type: ignore[method-assign]
    elif how == "on another lane":
        learner.layers[0].dispatcher = replace(learner.layers[0].dispatcher, lane=mesh.grads)
    with pytest.raises(ScheduleError) as told:
        learner.step(0)
    return str(told.value)


BROKEN = {
    "one op less in the program": r"'exchange of sizes, layer 0, microbatch 0' is launched .*SCORES_F",
    "one launch more": r"'somebody asks' is launched on lane 'a2a', but .* next there is 0.0LOADS_F0",
    "one launch less": r"BUCKET_GATHER",
    "two buckets in another order": r"BUCKET_GATHER",
    "on another lane": r"'exchange of sizes, layer 0, microbatch 0' is launched on lane 'dp'",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_a_step_does_otherwise_is_told(corpus: str, how: str) -> None:
    for said in run_ranks(2, fails, configure(corpus, **BASE), how):
        assert re.search(BROKEN[how], said), said


def whole_program(mesh: Mesh, config: TrainConfig) -> Counter[str]:
    learner = Learner(config, mesh)
    return Counter(op.kind.name for op in learner.program().program.ranks[mesh.pp_index])


def test_one_op_is_one_launch(corpus: str) -> None:
    """Four microbatches in four layers of two stages each way; sizes, scores and loads stand beside rows."""
    changes = {**BASE, "optim.accumulate": 4, "pipeline.schedule": "dualpipev", "pipeline.overlap": "pair"}
    found = run_ranks(4, whole_program, configure(corpus, **changes), pp=2)[0]
    for name in ("DISPATCH_F", "DISPATCH_B", "COMBINE_F", "COMBINE_B", "SIZES_F", "SCORES_F", "SCORES_B"):
        assert found[name] == 8, name
    assert found["LOADS_F"] == 8
    assert found["RESULTS_GATHER"] == found["LOADS_GATHER"] == found["LOADS_SUM"] == 1
    assert found["BUCKET_REDUCE"] == found["BUCKET_GATHER"] == found["BUCKET_UPDATE"] > 4


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
def test_the_step_of_two_directions_shares_parameters_over_both_places(corpus: str, schedule: str) -> None:
    config = configure(corpus, **{**BASE, "pipeline.schedule": schedule, "optim.accumulate": 4})
    layout = lay_out(config.pipeline, config.model.num_layers, 2, config.optim.accumulate)
    _, step = shapes_of_run(config, (1, 1, 1), layout)
    both = schedule == "dualpipe"  # in the other one a rank has both ends of one copy
    assert step.mirrored is both
    assert step.members("dense_grads", 1, 2, 1) == ((0, 1) if both else (1,))
