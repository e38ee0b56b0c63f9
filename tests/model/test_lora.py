"""Adapters beside linears: nothing at first, then what the merged weight would add, on one rank and two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.blocks import Settings
from moeclipse.model.lora import LoraColumn, LoraRow
from moeclipse.model.lora_config import LoraConfig
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone

LORA = LoraConfig(rank=2, alpha=6.0)


def made(kind: Any, mesh: Mesh) -> Any:
    settings = Settings(
        layer=0,
        num_layers=1,
        seed=0,
        init_std=0.3,
        device=torch.device("cpu"),
        dtype=torch.float64,
        tp=TensorParallel.of(mesh),
    )
    return kind(6, 4, "q", settings, LORA, 1)


def apart(mesh: Mesh, kind: Any, rows: int) -> tuple[float, float]:
    """(the largest value at first, how far gradients are from those of a merged weight)."""
    adapter = made(kind, mesh)
    x = fill_normal(torch.empty(rows, 6, dtype=torch.float64), 3, 1.0).requires_grad_()
    fresh = adapter(x).abs().sum()
    fill_normal(adapter.b.weight.data, 5, 1.0)
    out = adapter(x)
    out.square().sum().backward()
    a, b = (part.weight.detach().clone().requires_grad_() for part in (adapter.a, adapter.b))
    y = x.detach().clone().requires_grad_()
    expected = y @ (3.0 * b @ a).t()
    expected.square().sum().backward()
    pairs = (
        (out, expected),
        (x.grad, y.grad),
        (adapter.a.weight.grad, a.grad),
        (adapter.b.weight.grad, b.grad),
    )
    return float(fresh), max(
        difference(mine.detach(), theirs.detach()) for mine, theirs in pairs if len(mine)
    )


@pytest.mark.parametrize("kind", [LoraColumn, LoraRow])
@pytest.mark.parametrize("rows", [5, 1])
def test_an_adapter_is_a_weight_of_low_rank(kind: Any, rows: int) -> None:
    fresh, far = run_alone(apart, kind, rows)
    assert fresh == 0
    assert far <= 1e-12
