"""The layer as a node of autograd: what torch promises of its own nodes holds for ours."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from own_models import KINDS, Net, assert_alike, gradients, layer, loss_of, often, tokens
from torch.func import functional_call

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

EXCHANGES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "smart": {"exchange": {"schedule": "smart", "group_size": 1, "chunks": 2}},
    "shadow": {"exchange": {"shadow": (0, 3)}},
}


def changed_in_place(mesh: Mesh, kind: str, shared: bool) -> str:
    moe = layer(kind, mesh=mesh if mesh.num_ranks > 1 else None, num_shared_experts=1)
    y = moe(tokens(rank=mesh.rank))
    with torch.no_grad():
        for weight in (moe.shared if shared else moe.experts).parameters():
            weight.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "shared"),
    often(product(KINDS, [False, True]), ("built-in", False), ("built-in", True), ("modules", False)),
)
def test_a_weight_changed_between_forward_and_backward_raises(kind: str, shared: bool) -> None:
    assert "modified by an inplace operation" in run_alone(changed_in_place, kind, shared)


def given_weights(mesh: Mesh, kind: str, more: dict[str, Any]) -> None:
    """The gradient belongs to the weights that were given, not to those that the layer has."""
    made = Net(layer(kind, mesh=mesh if mesh.num_ranks > 1 else None, num_shared_experts=1, **more))
    x = tokens(rank=mesh.rank)
    given = {name: (1.5 * p.detach()).requires_grad_() for name, p in made.named_parameters()}
    with torch.no_grad():
        named = list(made.named_parameters())
        before = [p.clone() for _, p in named]
        for name, p in named:
            p.copy_(given[name])
    made(x).square().sum().backward()
    expected = gradients(made)
    with torch.no_grad():
        for (_, p), value in zip(named, before, strict=True):
            p.copy_(value)
    made.zero_grad()
    y = functional_call(made, given, (x,))
    found = torch.autograd.grad(y.square().sum(), list(given.values()))
    assert_alike(dict(zip(given, found, strict=True)), expected)
    assert all(p.grad is None for p in made.parameters())


@pytest.mark.parametrize("kind", often(KINDS, "kernels", "joint"))
def test_functional_call_on_one_rank(kind: str) -> None:
    run_alone(given_weights, kind, {})


@pytest.mark.parametrize(
    ("kind", "exchange"),
    often(product(["built-in", "modules"], EXCHANGES), ("built-in", "smart"), ("modules", "shadow")),
)
def test_functional_call_on_two_ranks(kind: str, exchange: str) -> None:
    run_ranks(2, given_weights, kind, EXCHANGES[exchange])


def twice(mesh: Mesh, kind: str, more: dict[str, Any]) -> str:
    model = Net(layer(kind, mesh=mesh if mesh.num_ranks > 1 else None, num_shared_experts=1, **more))
    loss = loss_of(model, tokens(rank=mesh.rank))
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_alike(gradients(model), {name: 2 * grad for name, grad in once.items()}, bound=1e-15)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "exchange"),
    often(
        product([kind for kind in KINDS if kind != "joint"], EXCHANGES),
        *(("built-in", "shadow"), ("kernels", "smart"), ("modules", "blocking")),
    ),
)
def test_a_graph_that_is_kept_runs_again_and_one_that_is_not_says_so(kind: str, exchange: str) -> None:
    for text in [run_alone(twice, kind, {}), *run_ranks(2, twice, kind, EXCHANGES[exchange])]:
        assert "backward through the graph a second time" in text


@pytest.mark.parametrize("kind", KINDS)
@apart
def test_gradcheck(kind: str) -> None:
    moe = layer(kind, GateConfig(top_k=6), num_shared_experts=1)  # all experts: the choice cannot jump
    names, weights = zip(*moe.named_parameters(), strict=True)

    def run(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return functional_call(moe, dict(zip(names, given, strict=True)), (x,))

    x = tokens(count=3).requires_grad_()
    given = [weight.detach().clone().requires_grad_() for weight in weights]
    assert torch.autograd.gradcheck(run, (x, *given), fast_mode=True)


class Careless(torch.nn.Module):
    """Changes in place what its own graph has saved."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * self.factor).mul_(2)


@apart
def test_an_expert_that_spoils_its_own_graph_is_refused_as_torch_does() -> None:
    moe = layer(experts=Careless)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        moe(tokens()).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@apart
def test_frozen_experts_pass_gradients_on_and_get_none(kind: str) -> None:
    moe, other = layer(kind), layer(kind)
    moe.experts.requires_grad_(False)
    x, y = tokens().requires_grad_(), tokens().requires_grad_()
    moe(x).sum().backward()
    other(y).sum().backward()
    assert difference(x.grad, y.grad) <= 1e-15
    assert all(p.grad is None for p in moe.experts.parameters())


@pytest.mark.parametrize("kind", ["built-in", "biased", "kernels"])
@apart
def test_some_weights_may_be_frozen(kind: str) -> None:
    moe, other = layer(kind), layer(kind)
    moe.experts.down.requires_grad_(False)
    moe(tokens()).sum().backward()
    other(tokens()).sum().backward()
    assert moe.experts.down.grad is None
    assert difference(moe.experts.up.grad, other.experts.up.grad) <= 1e-15
