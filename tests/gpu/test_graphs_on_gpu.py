"""Microbatches as CUDA graphs: the same bits, few launches, and what cannot be captured goes on eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.graphs import WARM_STEPS
from moeclipse.train.step.learner import Learner

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 256,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 64,
    "model.dtype": "bfloat16",
    "moe.num_experts": 16,
    "moe.d_ff": 128,
    "moe.num_shared_experts": 1,
    "gate.top_k": 4,
    "data.seq_len": 128,
    "data.batch_size": 8,
    "data.files": (str(Path(__file__).parent.parent / "train" / "text.txt"),),
}


def trained(**changes: Any) -> tuple[Learner, list[Any]]:
    learner = Learner(with_values(TrainConfig(), {**SMALL, **changes}), Mesh.single("cuda"))
    records = [learner.step(step) for step in range(WARM_STEPS + 4)]
    return learner, [(record["loss"], record["grad_norm"], record["load"]) for record in records]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.accumulate": 4},
        {"optim.accumulate": 2, "gate.bias_rate": 0.001, "gate.kind": "sigmoid"},
        {"model.dtype": "float16", "optim.accumulate": 2},
        {"data.seq_len": 512, "model.head_dim": 64},
    ],
    ids=["one", "four", "bias", "fp16", "long"],
)
def test_the_same_bits_with_and_without(changes: dict[str, Any]) -> None:
    try:
        graphed, curve = trained(**changes, **{"run.deterministic": True})
        eager, plain = trained(**changes, **{"run.graphs": "off", "run.deterministic": True})
        _, again = trained(**changes, **{"run.deterministic": True})
    finally:
        torch.use_deterministic_algorithms(False)
    assert again == curve, "two runs"
    assert graphed.graphs is not None
    assert not graphed.graphs.refused
    assert len(graphed.graphs._graphs) == min(changes.get("optim.accumulate", 1), 2)
    assert eager.graphs is None
    assert curve == plain
    for mine, theirs in zip(graphed.buckets, eager.buckets, strict=True):
        assert torch.equal(mine.params, theirs.params)


def test_a_replayed_step_has_few_launches() -> None:
    from torch.profiler import ProfilerActivity, profile

    learner, _ = trained(**{"optim.accumulate": 4})
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        learner.step(10)
    names = [event.name for event in found.events()]
    assert sum(name.startswith("cudaGraphLaunch") for name in names) == 4
    assert sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names) < 300


def test_a_layer_that_asks_the_host_is_told() -> None:
    learner = Learner(with_values(TrainConfig(), SMALL), Mesh.single("cuda"))
    block = learner.layers[0]
    real = block.run
    block.run = lambda x, *rest, **more: (float(x.sum()), real(x, *rest, **more))[1]  # type: ignore
    notes: list[str] = []
    for step in range(WARM_STEPS + 2):
        record = learner.step(step)
        notes += record.get("notes", [])
        assert not record["skipped"]
    assert len(notes) == 1
    assert notes[0].startswith("microbatches run without CUDA graphs: ")
    assert torch.randn(3, device="cuda").isfinite().all(), "a layer may draw random numbers afterwards"
