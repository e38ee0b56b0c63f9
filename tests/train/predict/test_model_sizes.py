"""A configuration's sizes: the same parameters, the same work as the model itself counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.cost.step_bytes import Sharing
from moeclipse.model.count import count_parameters
from moeclipse.model.flops import LeastWork
from moeclipse.model.transformer import Transformer
from moeclipse.train.optim.parameter_groups import ParameterGroups
from moeclipse.train.predict.model_sizes import sizes_of, sizes_of_run
from moeclipse.train.presets import load, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_parameters_and_flops_are_those_of_the_model(name: str) -> None:
    config = load(preset=name)
    sizes = sizes_of(config.model, config.moe, config.gate)
    counted, _ = count_parameters(config.model, config.moe, config.gate)
    assert sizes.parameters == pytest.approx(counted, rel=0.001)
    work = LeastWork.of(config.model, config.moe, config.gate, tokens=256, seq_len=256)
    assert 256 * sizes.flops_per_token(256) == pytest.approx(work.flops, rel=0.001)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora.rank": 4},
        {"lora.rank": 8, "lora.targets": ("q", "v")},
        {"lora.rank": 4, "lora.targets": ("experts",)},
        {"lora.rank": 4, "lora.targets": ("down",)},
        {"optim.frozen": ("moe.experts",)},
        {"optim.frozen": ("gate", "norm", "embedding")},
        {"optim.frozen": ("layers.1.",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["tiny", "deepseek-v3-tiny"])
def test_what_is_trained_is_what_the_model_trains(name: str, changes: dict[str, Any]) -> None:
    """Parameters and flops against the model's own, by name."""
    config = with_values(load(preset=name), changes)
    sizes = sizes_of_run(config)
    groups = ParameterGroups.of(config.optim, config.lora)
    mesh = Mesh.single(torch.device("meta"))
    model = Transformer(config.model, config.moe, config.gate, mesh=mesh, lora=config.lora)
    trained = sum(p.numel() for name, p in model.named_parameters() if not groups.is_frozen(name))
    layers = range(sizes.num_layers)
    tables = sum(sizes.trained_tables[: 1 if sizes.tied else 2]) * sizes.table_parameters
    held = Sharing().held(sizes, layers, (True, not sizes.tied))
    assert held.trained == pytest.approx(trained, rel=0.002)
    assert (
        sum(map(sizes.trained_dense, layers)) + sum(map(sizes.trained_experts, layers)) + tables
        == held.trained
    )
    everything = sum(p.numel() for p in model.parameters())
    assert held.experts + held.matrices + held.rest == pytest.approx(everything, rel=0.002)
    work = LeastWork.of(
        config.model,
        config.moe,
        config.gate,
        tokens=256,
        seq_len=256,
        lora=config.lora,
        is_frozen=groups.is_frozen,
    )
    flops = 256 * sizes.flops_per_token(256)
    if sizes.trained_dense(0) or sizes.trained_experts(0):
        assert flops == pytest.approx(work.flops, rel=0.01)
    else:  # what nothing is trained below of needs no backward on one rank; on several it has one
        assert flops > work.flops
