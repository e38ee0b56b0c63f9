"""Experts as a compiler sees them: what the layer gives eagerly, to the last digit of float64."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.experts.shared import visit_traced
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_alone


def both(mesh: Mesh, num_shared: int) -> tuple[float, float]:
    """Differences of outputs and of gradients."""
    moe = MoE(8, 16, 4, 2, num_shared_experts=num_shared, mesh=mesh, dtype=torch.float64, seed=3)
    x_TD = torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8).requires_grad_()
    tokens = Tokens(mesh=mesh, first=0, total=5)
    routing = moe.gate(x_TD, tokens)
    assert isinstance(moe.experts, Experts)
    found, grads = [], []
    traced = visit_traced(x_TD, routing, moe.experts, moe.shared)
    for y_TD in (traced, moe.apply_experts(routing, x_TD, tokens)):
        found.append(y_TD)
        grads.append(torch.autograd.grad(y_TD.square().sum(), x_TD, retain_graph=True)[0])
    return float((found[0] - found[1]).abs().max()), float((grads[0] - grads[1]).abs().max())


@pytest.mark.parametrize("num_shared", [0, 1])
def test_traced_experts_are_the_layers_own(num_shared: int) -> None:
    of_outputs, of_gradients = run_alone(both, num_shared)
    assert of_outputs < 1e-14
    assert of_gradients < 1e-13
