"""Activations by their definitions, and their gradients against autograd."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from apart import apart
from moeclipse.ops.activation import (
    ACTIVATIONS,
    GATED,
    activate,
    activate_backward,
    hidden_width,
)
from moeclipse.testing.compare import difference


@apart
def test_swiglu_backward_is_autograd() -> None:
    h = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    d_a = torch.randn(5, 4, dtype=torch.float64)
    gate, up = h.chunk(2, dim=-1)
    assert torch.equal(activate(h, "swiglu"), F.silu(gate) * up)
    (expected,) = torch.autograd.grad((activate(h, "swiglu") * d_a).sum(), h)
    d_h, a = activate_backward(d_a, h.detach(), "swiglu")
    assert difference(d_h, expected) < 1e-15
    assert difference(a, activate(h, "swiglu")) < 1e-15


def test_values_by_their_formulas() -> None:
    h = torch.tensor([[-1.0, 2.0, 3.0, 0.5]], dtype=torch.float64)
    gate, up = [-1.0, 2.0], [3.0, 0.5]
    gelu = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in (-1.0, 2.0, 3.0, 0.5)]
    expected = {
        "swiglu": [x / (1 + math.exp(-x)) * u for x, u in zip(gate, up, strict=True)],
        "geglu": [gelu[0] * up[0], gelu[1] * up[1]],
        "relu2": [0.0, 4.0, 9.0, 0.25],
        "gelu": gelu,
        "clamped_swiglu": [x / (1 + math.exp(-1.702 * x)) * (u + 1) for x, u in zip(gate, up, strict=True)],
    }
    for kind in ACTIVATIONS:
        assert activate(h, kind)[0].tolist() == pytest.approx(expected[kind], abs=1e-15), kind


@pytest.mark.parametrize("activation", ACTIVATIONS)
@apart
def test_gradients_are_those_of_autograd(activation: str) -> None:
    torch.manual_seed(0)
    h = (5 * torch.randn(7, 8, dtype=torch.float64)).requires_grad_()  # beyond the limits, too
    a = activate(h, activation)
    assert a.shape[1] == (4 if activation in GATED else 8)
    d_a = torch.randn_like(a)
    (expected,) = torch.autograd.grad(a, h, d_a)
    d_h, rebuilt = activate_backward(d_a, h.detach(), activation)
    assert difference(d_h, expected) < 1e-14
    assert difference(rebuilt, a) < 1e-14


def test_gated_experts_project_twice() -> None:
    assert [hidden_width(kind, 12) for kind in ACTIVATIONS] == [24, 24, 12, 12, 24]
