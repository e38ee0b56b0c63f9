"""The fused path on CPU, where its kernels are their references: exact in float64, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parity import compare, gradients, make, run

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.fused import fits
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(kind="gshard", top_k=2, z_loss=0.1)


def fused(
    mesh: Mesh, gate: GateConfig, sizes: list[int], exchange: dict[str, Any], main_grad: bool = False
) -> dict[str, Any]:
    moe = make(gate, 8, 1, mesh, exchange=exchange)
    moe.fused = True
    if main_grad:
        for parameter in moe.experts.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
    result = gradients(moe, mesh, sizes)
    for name, parameter in moe.experts.named_parameters():
        if main_grad:
            result[f"experts.{name}"] = parameter.main_grad
    return result


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_one_rank(top_k: int, main_grad: bool) -> None:
    gate = GateConfig(top_k=top_k)
    expected = run_alone(run, gate, 8, 1, [13])
    found = run_alone(fused, gate, [13], {}, main_grad)
    for name in ("y", "dx", "gate.weight", "experts.up", "experts.down"):
        assert difference(found[name], expected[name]) <= 1e-12, name


@pytest.mark.parametrize(
    "exchange",
    [
        {},
        {"schedule": "smart", "group_size": 1, "chunks": 2},
        {"schedule": "smart", "group_size": 1, "chunks": 3, "shadow": (0, 5)},
    ],
    ids=["blocking", "smart", "shadows"],
)
@pytest.mark.parametrize("gate", [GATE, GateConfig(top_k=5)], ids=["gshard", "softmax"])
def test_several_ranks(exchange: dict[str, Any], gate: GateConfig) -> None:
    sizes = [5, 0, 9, 4]
    expected = run_alone(run, gate, 8, 1, [sum(sizes)])
    compare(run_ranks(4, fused, gate, sizes, exchange), expected, 1, 4)


def test_kernels_take_one_tensor_of_half_precision_on_a_device_they_know() -> None:
    experts, rows = Experts((0, 1), d_model=16, d_ff=24).bfloat16(), torch.ones(3, 16).bfloat16()
    assert not fits(experts, [rows]), "not on a CPU"
    assert not fits(experts, [rows, rows])
    assert not fits(Experts((), d_model=16, d_ff=24), [rows]), "a rank without experts"
