"""Parts of microbatches as CUDA graphs, on one rank and on two over NCCL: the same bits, few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_graphs_on_gpu import SMALL
from test_nccl import HAS_NCCL

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.graphs import WARM_STEPS
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.partial_graphs import PartCapture, PartGraphs

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
OVER_NCCL: dict[str, Any] = {"device": "cuda", "backend": "nccl", "deadline_s": 200}
DENSE_FIRST = {**SMALL, "model.num_layers": 3, "model.num_dense_layers": 1, "run.deterministic": True}
CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "four": {"optim.accumulate": 4},
    "bias": {"optim.accumulate": 2, "gate.bias_rate": 0.001, "gate.kind": "sigmoid"},
    "smart": {"optim.accumulate": 2, "moe.schedule": "smart", "moe.chunks": 2},
    "fp16": {"model.dtype": "float16", "optim.accumulate": 2},
    "draws": {"gate.kind": "gshard", "gate.top_k": 2, "optim.accumulate": 2},
}


def launches_of(learner: Learner) -> tuple[int, int]:
    """(replays, other launches) of one step more."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        learner.step(10)
    names = [event.name for event in found.events()]
    replays = sum(name.startswith("cudaGraphLaunch") for name in names)
    return replays, sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)


def trained(mesh: Mesh, graphs: str, **changes: Any) -> tuple[Learner, list[Any]]:
    learner = Learner(with_values(TrainConfig(), {**DENSE_FIRST, **changes, "run.graphs": graphs}), mesh)
    if graphs != "off" and mesh.num_ranks == 1:  # where whole microbatches would be captured
        sequential = learner.sequential
        sequential.graphs = None
        layers = learner.model.all_layers
        sequential.parts = PartGraphs(layers, PartCapture(mesh.device), mesh.recorder)
    records = [learner.step(step) for step in range(WARM_STEPS + 4)]
    found: list[Any] = [(record["loss"], record["grad_norm"], record["load"]) for record in records]
    return learner, [*found, [float(bucket.params.double().sum()) for bucket in learner.buckets]]


def both(mesh: Mesh, changes: dict[str, Any]) -> dict[str, Any]:
    try:
        with_, curve = trained(mesh, "auto", **changes)
        without, plain = trained(mesh, "off", **changes)
    finally:
        torch.use_deterministic_algorithms(False)
    parts = with_.sequential.parts
    assert parts is not None
    assert without.graphs is None
    return {
        "curve": curve,
        "plain": plain,
        "refused": parts.refused,
        "captured": len(parts._parts),
        "launches": (launches_of(with_), launches_of(without)),
    }


def check(found: dict[str, Any], changes: dict[str, Any]) -> None:
    accumulate = changes.get("optim.accumulate", 1)
    assert not found["refused"]
    assert found["captured"] == 3 * min(accumulate, 2)
    assert found["curve"] == found["plain"]
    (replays, others), (none, eagerly) = found["launches"]
    assert (replays, none) == (2 * 3 * accumulate, 0)
    assert others + replays < 0.9 * eagerly


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_one_rank(case: str) -> None:
    check(both(Mesh.single("cuda"), CASES[case]), CASES[case])


@pytest.mark.nccl
@pytest.mark.skipif(not HAS_NCCL, reason="needs a CUDA device and NCCL")
@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize(("case", "dp"), [("one", 1), ("four", 1), ("smart", 1), ("draws", 1), ("four", 2)])
def test_the_same_bits_on_two_ranks(case: str, dp: int) -> None:
    for found in run_ranks(2, both, CASES[case], dp=dp, **OVER_NCCL):
        check(found, CASES[case])


def kept(mesh: Mesh, accumulate: int) -> tuple[int, int]:
    """Bytes in use between steps that graphs added, and a layer's rows."""
    sizes = {"model.num_layers": 6, "model.num_dense_layers": 1, "model.d_model": 1024, "data.seq_len": 512}
    batch = {"optim.accumulate": accumulate, "data.batch_size": 8 * accumulate}
    config = with_values(TrainConfig(), {**SMALL, **sizes, **batch})
    learner = Learner(config, mesh)
    sequential = learner.sequential
    sequential.graphs = None
    sequential.parts = PartGraphs(learner.model.all_layers, PartCapture(mesh.device), mesh.recorder)
    found = []
    for step in range(WARM_STEPS + 3):
        learner.step(step)
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated())
    assert not sequential.parts.refused
    return found[-1] - found[WARM_STEPS - 1], 8 * 512 * config.model.d_model * learner.model.dtype.itemsize


def test_graphs_keep_a_place_for_what_they_read_and_none_for_what_they_give() -> None:
    """Inputs of six layers, and gradients of what a part gives: one place for all layers and microbatches."""
    for accumulate in (1, 4):
        added, rows = kept(Mesh.single("cuda"), accumulate)
        assert 6 * rows <= added < 10 * rows, accumulate
