"""Experts that are frozen, or were not used, are never touched."""

from __future__ import annotations

import pytest
import torch
from own_models import Net, layer, loss_of, tokens

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_alone, run_ranks


def frozen(mesh: Mesh, kind: str) -> None:
    model = Net(layer(kind, mesh=mesh if mesh.num_ranks > 1 else None))
    model.moe.experts.requires_grad_(False)
    before = [p.clone() for p in model.moe.experts.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for number in range(2):
        loss_of(model, tokens(number, mesh.rank)).backward()
        moeclipse.sync_gradients(model)
        optimizer.step()
    for parameter, value in zip(model.moe.experts.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("kind", ["built-in", "modules"])
def test_frozen_experts_stay(kind: str) -> None:
    run_alone(frozen, kind)
    run_ranks(2, frozen, kind)


def unused(mesh: Mesh) -> None:
    """A layer that nobody called in this step has no gradients, as any other module."""
    model = Net(layer(mesh=mesh if mesh.num_ranks > 1 else None))
    model.extra = layer(mesh=mesh if mesh.num_ranks > 1 else None)
    before = [p.clone() for p in model.extra.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(tokens(rank=mesh.rank)).sum().backward()
    moeclipse.sync_gradients(model)
    optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(model.extra.parameters(), before, strict=True))
    assert all(p.grad is not None for p in model.moe.parameters())


def test_a_layer_that_did_not_run_stays() -> None:
    run_alone(unused)
    run_ranks(2, unused)


def on_one_rank_only(mesh: Mesh) -> None:
    """A rank whose gradients are missing takes part all the same, and gets those of the others."""
    model = Net(layer(mesh=mesh))
    model(tokens(rank=mesh.rank)).sum().backward()
    if mesh.rank == 1:
        model.moe.experts.up.grad = None
    moeclipse.sync_gradients(model)
    assert model.moe.experts.up.grad is not None


def test_ranks_agree_about_who_has_gradients() -> None:
    run_ranks(2, on_one_rank_only, dp=2)
