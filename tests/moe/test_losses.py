"""Losses of a gate by their formulas: means over all tokens, of which each rank has its share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.gates import Gate
from moeclipse.moe.gate.routing import GateSums, Routing
from moeclipse.moe.losses import MOST_CALLS, balance_loss, z_loss
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal

T, D, E = 48, 6, 8
CONFIGS = {
    "top_k": GateConfig(top_k=2),
    "as many as they like": GateConfig(choose="threshold", top_k=4, threshold=0.125),
}


def route(config: GateConfig) -> Routing:
    gate = Gate(config, d_model=D, num_experts=E, init=WeightInit(std=0.8, dtype=torch.float64))
    x = fill_normal(torch.empty(T, D, dtype=torch.float64), 4, 1.0)
    return gate(x, Tokens(mesh=Mesh.single(), first=0, total=T))


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_by_their_formulas(name: str) -> None:
    routing = route(CONFIGS[name])
    rows = int((routing.expert_ids_TK >= 0).sum())
    assert rows == 2 * T if name == "top_k" else T < rows < 4 * T
    assert routing.load_E.sum() == rows, "rows there are, not places for them"
    share = routing.load_E.double() / rows
    expected = E * (share * routing.probs_TE.mean(0)).sum()
    assert torch.allclose(balance_loss(routing, routing.load_E, T), expected, rtol=1e-13)
    assert torch.allclose(z_loss(routing, T), routing.logits_TE.logsumexp(-1).square().mean(), rtol=1e-13)


def test_shares_of_ranks_add_up() -> None:
    whole = route(CONFIGS["top_k"])
    parts = [
        replace(whole, probs_TE=whole.probs_TE[part], logits_TE=whole.logits_TE[part])
        for part in (slice(0, 11), slice(11, 11), slice(11, T))
    ]
    balance = sum(balance_loss(part, whole.load_E, T) for part in parts)
    assert torch.allclose(balance, balance_loss(whole, whole.load_E, T), rtol=1e-13)
    assert torch.allclose(sum(z_loss(part, T) for part in parts), z_loss(whole, T), rtol=1e-13)


def test_a_gate_that_drops_nothing_gives_the_same_from_its_sums() -> None:
    slow = route(CONFIGS["top_k"])
    sums = GateSums(prob_E=slow.probabilities, squares=slow.squares)
    fast = replace(slow, probs_TE=None, logits_TE=None, sums=sums, complete=True)
    assert torch.allclose(balance_loss(fast, slow.load_E, T), balance_loss(slow, slow.load_E, T), rtol=1e-13)
    assert z_loss(fast, T) == z_loss(slow, T)
    assert fast.num_dropped == slow.num_dropped == 0


def test_even_load_costs_one_and_no_tokens_cost_nothing() -> None:
    even = torch.full((4, E), 1 / E)
    routing = replace(route(CONFIGS["top_k"]), probs_TE=even, logits_TE=even)
    assert balance_loss(routing, torch.ones(E), 4) == pytest.approx(1)
    nobody = replace(routing, probs_TE=even[:0], logits_TE=even[:0])
    assert balance_loss(nobody, torch.zeros(E), 0) == 0
    assert z_loss(nobody, 0) == 0


def test_a_layer_that_is_called_twice_counts_twice() -> None:
    torch.manual_seed(0)
    layer = moeclipse.MoE(d_model=8, d_ff=8, num_experts=4, gate={"balance_loss": 1.0}, dtype=torch.float64)
    first, second = torch.randn(2, 6, 8, dtype=torch.float64).unbind()
    alone = []
    for x in (first, second):
        layer(x)
        alone.append(moeclipse.aux_loss(layer))
    expected = torch.autograd.grad(sum(alone), layer.gate.weight)[0]
    y = layer(first) + layer(second)
    both = moeclipse.aux_loss(layer)
    assert torch.equal(both, alone[0] + alone[1])
    assert torch.equal(moeclipse.aux_loss(layer), both), "whoever asks again is told the same"
    assert torch.allclose(torch.autograd.grad(both, layer.gate.weight)[0], expected, atol=1e-14)
    layer(first)
    assert torch.equal(moeclipse.aux_loss(layer), alone[0]), "another forward begins anew"
    assert y.shape == first.shape


def test_losses_that_nobody_asks_for_do_not_pile_up() -> None:
    layer = moeclipse.MoE(d_model=8, d_ff=8, num_experts=4)
    for _ in range(3):
        layer(torch.randn(5, 8)).sum().backward()
    assert len(layer.unread.losses) == 1
    with torch.no_grad():
        for _ in range(MOST_CALLS + 3):
            layer(torch.randn(5, 8))
    assert len(layer.unread.losses) == MOST_CALLS
    layer(torch.randn(5, 8))
    assert len(layer.unread.losses) == 1, "what ran without a graph is no part of what has one"
    layer.eval()
    for _ in range(3):
        layer(torch.randn(5, 8)).sum().backward()
    assert len(layer.unread.losses) == 1
