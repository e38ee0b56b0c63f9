"""Pairs, halves and recompute on a CUDA device: streams must keep the order that the verifier proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

# Counted through NVML: asking CUDA itself here would spoil forked ranks.
HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

SMALL: dict[str, Any] = {
    "model.num_layers": 3,
    "model.d_model": 64,
    "model.head_dim": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.dtype": "float64",
    "model.tie_embeddings": True,
    "moe.num_experts": 8,
    "moe.d_ff": 32,
    "moe.num_shared_experts": 1,
    "gate.z_loss": 0.01,
    "data.seq_len": 32,
    "data.batch_size": 16,
    "data.files": (__file__,),
    "optim.accumulate": 4,
}
MODES: dict[str, dict[str, Any]] = {
    "serial": {"pipeline.schedule": "1f1b"},
    "pair": {"pipeline.overlap": "pair"},
    "pair+self": {"pipeline.overlap": "pair+self"},
    "recompute": {"pipeline.overlap": "pair+self", "pipeline.recompute": "full"},
}


def gradients(mesh: Mesh, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    learner = Learner(with_values(TrainConfig(), values), mesh)
    learner.backward(0)
    return {f"{bucket.name}, rank {mesh.rank}": bucket.reduced().double().cpu() for bucket in learner.buckets}


def compare(ranks: int, changes: dict[str, Any], bound: float) -> None:
    plain = run_ranks(ranks, gradients, {**SMALL, **changes}, device="cuda:0", deadline_s=120)
    for mode, overlap in MODES.items():
        found = run_ranks(ranks, gradients, {**SMALL, **changes, **overlap}, device="cuda:0", deadline_s=120)
        for expected, mine in zip(plain, found, strict=True):
            worst = {name: difference(mine[name], expected[name]) for name in expected}
            assert max(worst.values()) < bound, (mode, worst)


def test_one_rank_in_float64() -> None:
    compare(1, {}, 1e-12)


def test_two_ranks_through_pinned_memory() -> None:
    compare(2, {"moe.transport": "pinned", "model.dtype": "float32"}, 2e-5)


def test_kernels_in_bf16() -> None:
    """The fused experts in pieces give what they give whole, up to the rounding of other sums."""
    compare(1, {"model.dtype": "bfloat16"}, 0.05)
