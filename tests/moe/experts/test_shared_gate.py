"""A shared expert behind a gate: its three calls against autograd, and in a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.experts.shared import GatedShared
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.layer import MoE
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

INIT = WeightInit(std=0.4, dtype=torch.float64)


def plain(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    half, other = F.linear(x, up[0]).chunk(2, dim=-1)
    return torch.sigmoid(F.linear(x, gate)) * F.linear(F.silu(half) * other, down[0])


@apart
def test_three_calls_are_autograd() -> None:
    shared = GatedShared(Experts([-1], d_model=6, d_ff=5, init=INIT), INIT)
    for rows in (7, 1, 0):
        x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
        dy = torch.randn(rows, 6, dtype=torch.float64)
        expected = plain(x, *shared.weights)
        wanted = torch.autograd.grad((expected * dy).sum(), [x, *shared.weights])
        with torch.no_grad():
            y, saved = shared.forward(x, [rows])
            dx, pending = shared.dgrad(dy, saved)
            grads = shared.wgrad([pending])
            twice = shared.wgrad([pending, pending])
        for found, right in zip([y, dx, *grads], [expected, *wanted], strict=True):
            assert difference(found, right) < 1e-12
        for found, right in zip(twice, grads, strict=True):
            assert difference(found, 2 * right) < 1e-12


@apart
def test_gradients_add_into_main_grad() -> None:
    shared = GatedShared(Experts([-1], d_model=6, d_ff=5, init=INIT), INIT)
    x = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        _, saved = shared.forward(x, [4])
        _, pending = shared.dgrad(x, saved)
        expected = shared.wgrad([pending])
        for weight in shared.weights:
            weight.main_grad = torch.ones_like(weight)
        assert shared.wgrad([pending]) == (None, None, None)
    for weight, grad in zip(shared.weights, expected, strict=True):
        assert difference(weight.main_grad, 1 + grad) < 1e-12


def layer(mesh: Mesh) -> dict[str, torch.Tensor]:
    moe = MoE(
        6, 5, 4, num_shared_experts=1, shared_d_ff=8, shared_gate=True, mesh=mesh,
        init_std=0.4, dtype=torch.float64,
    )  # fmt: skip
    tokens = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = tokens.chunk(mesh.num_ranks)[mesh.rank].clone().requires_grad_()
    y = moe(x)
    y.square().sum().backward()
    assert moe.shared is not None
    return {"y": y.detach(), "gate": moe.shared.gate.grad, "x": x.grad}


def test_a_layer_gives_one_process_gradients_on_two_ranks() -> None:
    expected, found = run_alone(layer), run_ranks(2, layer)
    assert difference(torch.cat([part["y"] for part in found]), expected["y"]) < 1e-12
    assert difference(torch.cat([part["x"] for part in found]), expected["x"]) < 1e-12
    assert difference(found[0]["gate"] + found[1]["gate"], expected["gate"]) < 1e-12


def test_without_the_gate_it_is_another_layer() -> None:
    gated, bare = (
        MoE(6, 5, 4, num_shared_experts=1, shared_gate=gate, dtype=torch.float64) for gate in (True, False)
    )
    x = torch.randn(3, 6, dtype=torch.float64)
    assert difference(gated(x), bare(x)) > 1e-3
