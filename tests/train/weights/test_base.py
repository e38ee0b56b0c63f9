"""A base in few bits: gradients of its decoded numbers in any layout, its bits in checkpoints, its sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.ops.frozen import KINDS, Frozen
from moeclipse.ops.random import fill_normal
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import OneRank, PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.base import DecodedWeights
from moeclipse.train.weights.init_from import load_weights_of

Shards = list[tuple[str, int, torch.Tensor]]
VALUES: dict[str, Any] = {
    **{"model.num_layers": 3, "model.num_dense_layers": 1, "model.d_model": 32, "model.d_ff": 64},
    **{"model.num_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16, "model.dtype": "float64"},
    **{"moe.num_experts": 4, "moe.d_ff": 32, "moe.num_shared_experts": 1, "gate.top_k": 2},
    **{"lora.rank": 4, "lora.targets": ("q", "v", "experts"), "model.base": "nf4", "model.dense_base": "nf4"},
    **{"data.seq_len": 8, "data.batch_size": 4, "optim.accumulate": 2, "parallel.check_launches": True},
}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "1": (1, {}, {}),
    "full recompute": (1, {}, {"pipeline.recompute": "full"}),
    "ep2": (2, {}, {"moe.schedule": "smart", "moe.chunks": 2}),
    "dp2": (2, {"dp": 2}, {"parallel.dp": 2}),
    "pp2": (2, {"pp": 2}, {"parallel.pp": 2}),
}


def configuration(folder: Path, **values: Any) -> TrainConfig:
    return with_values(TrainConfig(), {**VALUES, "data.files": (str(folder / "tokens.npy"),), **values})


def moved(learner: Learner) -> Learner:
    """With adapters that add something."""
    for number, (name, parameter) in enumerate(learner.model.named_parameters()):
        if "lora_" in name:
            fill_normal(parameter.data, number, 0.2)
    learner.optim.load_weights(DecodedModel(learner))
    return learner


class DecodedModel:
    """What the model of one rank has, for its optimizer."""

    def __init__(self, learner: Learner) -> None:
        self.named = {f"weight/{name}": p.detach() for name, p in learner.model.named_parameters()}

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
        return self.named[name].flatten()[start:stop] if name in self.named else None


def write(mesh: Mesh, folder: Path, kind: str) -> None:
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 256, 600).astype(np.uint16))
    config = configuration(folder, **{"model.base": kind, "model.dense_base": kind})
    moved(Learner(config, mesh)).save(folder / "checkpoints", 0)


def begun(mesh: Mesh, config: TrainConfig, folder: Path) -> Learner:
    learner = Learner(config, mesh)
    load_weights_of(str(folder / "checkpoints" / "step-00000000"), learner, PatientRanks(mesh, 60))
    return learner


def gradients(mesh: Mesh, config: TrainConfig, folder: Path, as_kernels: bool = False) -> Shards:
    """Of the adapters; then a step, after which the base is what it was."""
    learner = begun(mesh, config, folder)
    for layer in learner.layers:
        layer.fused = as_kernels
    learner.backward(0)
    found = []
    for bucket in learner.buckets:
        shard = bucket.reduced()
        found += [(s.entry.name, s.start, shard[s.offset : s.offset + s.length].clone()) for s in bucket.segments()]
    base = {name: p.detach().clone() for name, p in learner.model.named_parameters() if "lora_" not in name}
    learner.step(0)
    now = dict(learner.model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in base.items())
    return found


def apart(ranks: list[Shards], whole: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest of its tensor; every element once."""
    seen, far = dict.fromkeys(whole, 0), 0.0
    for name, start, values in (shard for rank in ranks for shard in rank):
        expected = whole[name][start : start + len(values)]
        far = max(far, float((values - expected).abs().max() / whole[name].abs().max()))
        seen[name] += len(values)
    assert seen == {name: len(value) for name, value in whole.items()}
    return far


@pytest.fixture(scope="module", params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp(request.param)
    run_alone(write, folder, request.param)
    return folder, request.param


def decoded_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """Of a model without a base whose weights are the decoded ones."""
    plain = configuration(folder, **{"model.base": "", "model.dense_base": ""})
    return {name: values for name, _, values in run_alone(gradients, plain, folder)}


@pytest.mark.parametrize("as_kernels", [False, True])
def test_gradients_are_those_of_the_decoded_weights(base: tuple[Path, str], as_kernels: bool) -> None:
    folder, kind = base
    config = configuration(folder, **{"model.base": kind, "model.dense_base": kind})
    found = run_alone(gradients, config, folder, as_kernels)
    assert apart([found], decoded_gradients(folder)) <= 1e-12


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("layouts")
    run_alone(write, folder, "nf4")
    return folder, decoded_gradients(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_any_layout(nf4: tuple[Path, dict[str, torch.Tensor]], layout: str) -> None:
    (folder, expected), (num_ranks, axes, values) = nf4, LAYOUTS[layout]
    found = run_ranks(num_ranks, gradients, configuration(folder, **values), folder, **axes)
    assert apart(found, expected) <= 1e-12
