"""All tokens gathered on several ranks of a GPU: a microbatch is one graph, with the bits of eager steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "train" / "step"))

from test_learner import configure
from test_nccl import HAS_NCCL, MODEL, corpus  # noqa: F401

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.token_gather import TokenGather
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.usefixtures("mps"),
    pytest.mark.skipif(not HAS_NCCL, reason="needs a CUDA device and NCCL"),
]
STEPS = 6
KERNELS = {
    "model.dtype": "bfloat16",
    "model.d_model": 128,
    "model.num_heads": 4,
    "model.head_dim": 32,
    "moe.kernels": "auto",
    "moe.d_ff": 64,
    "optim.accumulate": 2,
    "data.batch_size": 8,
    "data.seq_len": 64,
}
GATHERED = {"moe.schedule": "gathered", "placement.planner": "static"}
WAYS: dict[str, dict[str, Any]] = {
    "float64": {**GATHERED, "model.dtype": "float64"},
    "eager": {**GATHERED, **KERNELS, "run.graphs": "off", "moe.transport": "peer"},
    "peer": {**GATHERED, **KERNELS, "moe.transport": "peer"},
    "nccl": {**GATHERED, **KERNELS, "moe.transport": "direct"},
    "again": {**GATHERED, **KERNELS, "moe.transport": "peer", "pipeline.recompute": "full"},
}


def curve(mesh: Mesh, configs: dict[str, TrainConfig]) -> dict[str, tuple[list[float], int, str]]:
    """Of each way: losses, how many graphs there are, why there are none."""
    found = {}
    for name, config in configs.items():
        learner = Learner(config, mesh)
        losses = [float(learner.step(step)["loss"]) for step in range(STEPS)]
        graphs = learner.sequential.graphs
        found[name] = (losses, 0 if graphs is None else len(graphs._graphs), graphs.refused if graphs else "")
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_microbatch_is_one_graph(num_ranks: int, corpus: str) -> None:  # noqa: F811
    configs = {name: configure(corpus, **{**MODEL, **way}) for name, way in WAYS.items()}
    one = run_ranks(1, curve, configs, device="cuda", deadline_s=200)[0]
    for found in run_ranks(num_ranks, curve, configs, device="cuda", backend="nccl", deadline_s=300):
        for name, (losses, graphs, refused) in found.items():
            bound = 1e-12 if name == "float64" else 2e-2
            assert difference(torch.tensor(losses), torch.tensor(one[name][0])) <= bound, name
            assert not refused, (name, refused)
            assert graphs == (2 if name in ("peer", "nccl", "again") else 0), name
        assert found["peer"][0] == found["eager"][0], "a graph changes no bit"


def exchanged(mesh: Mesh) -> None:
    """Sizes that grow, types, parts that our kernel does not take, nothing at all; each against NCCL."""
    peer, nccl = TokenGather.of(mesh, mesh.experts, "peer"), TokenGather.of(mesh, mesh.experts, "direct")
    for rows, width in ((64, 32), (1, 3), (0, 8), (4096, 2048), (7, 16), (64, 32)):
        for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int32):
            mine = torch.arange(rows * width, device=mesh.device).view(rows, width).remainder(251)
            mine = (mine + 1000 * mesh.rank).to(dtype)
            assert torch.equal(peer.gather(mine, "gather"), nccl.gather(mine, "gather")), (rows, width, dtype)
            if dtype.is_floating_point:
                parts = mine.repeat(mesh.num_ranks, 1).remainder(64)  # sums are exact in every type
                assert torch.equal(peer.sum_back(parts, "sum"), nccl.sum_back(parts, "sum"))
    peer.check()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_over_memory_that_ranks_map(num_ranks: int) -> None:
    run_ranks(num_ranks, exchanged, device="cuda", backend="nccl", deadline_s=150)
