"""Experts with adapters in three calls: what autograd makes of merged weights, whatever wants a gradient."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.experts.lora_experts import OPERANDS, LoraExperts
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.ops.activation import Activation, activate
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.cut import cut_of
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone


def made(bias: bool = False) -> LoraExperts:
    init = WeightInit(std=0.4, dtype=torch.float64)
    base = Experts([0, 1, 2], d_model=4, d_ff=5, init=init, bias=bias)
    return LoraExperts(base, rank=2, scale=1.5)


def reference(experts: LoraExperts, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """One expert after the other, with merged weights."""
    out = []
    for e, rows in enumerate(x.split(counts)):
        up = experts.up[e] + 1.5 * experts.lora_up_b[e] @ experts.lora_up_a[e]
        down = experts.down[e] + 1.5 * experts.lora_down_b[e] @ experts.lora_down_a[e]
        h = rows @ up.t() + (experts.up_bias[e] if experts.biased else 0)
        out.append(activate(h, "swiglu") @ down.t() + (experts.down_bias[e] if experts.biased else 0))
    return torch.cat(out)


def apart(_mesh: Mesh, counts: list[int], bias: bool, frozen: bool) -> float:
    experts = made(bias)
    for number, weight in enumerate(experts.weights):
        fill_normal(weight.data, number, 0.5)
        weight.requires_grad_(not frozen or number >= len(experts.weights) - 4)
    x = fill_normal(torch.empty(sum(counts), 4, dtype=torch.float64), 9, 1.0).requires_grad_()
    expected = reference(experts, x, counts)
    dy = fill_normal(torch.empty_like(expected), 10, 1.0)
    wanted = [weight for weight in experts.weights if weight.requires_grad]
    d_x, *grads = torch.autograd.grad(expected, [x, *wanted], dy, allow_unused=True)
    zeros = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]
    theirs, far = [expected.detach(), d_x, *zeros], 0.0
    for _ in range(2):  # the same call twice
        with torch.no_grad():
            y, saved = experts.forward(x.detach(), counts)
            dx, pending = experts.dgrad(dy, saved)
            found = experts.wgrad([pending])
        for weight, grad in zip(experts.weights, found, strict=True):
            assert (grad is None) == (not weight.requires_grad)
        mine = [y, dx, *(grad for grad in found if grad is not None)]
        far = max([far, *(difference(m, t) for m, t in zip(mine, theirs, strict=True) if m.numel())])
    return far


@pytest.mark.parametrize("counts", [[3, 0, 4], [1, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_of_merged_weights(counts: list[int], bias: bool, frozen: bool) -> None:
    assert run_alone(apart, counts, bias, frozen) <= 1e-12


@torch.no_grad()
def test_fresh_adapters_add_nothing_and_depend_on_the_expert_alone() -> None:
    experts = made()
    x = fill_normal(torch.empty(4, 4, dtype=torch.float64), 1, 1.0)
    plain = Experts([0, 1, 2], d_model=4, d_ff=5, init=WeightInit(std=0.4, dtype=torch.float64))
    assert torch.equal(experts.forward(x, [2, 1, 1])[0], plain.forward(x, [2, 1, 1])[0])
    init = WeightInit(std=0.4, dtype=torch.float64)
    alone = LoraExperts(Experts([2], d_model=4, d_ff=5, init=init, num_experts=3), rank=2, scale=1.5)
    for name in OPERANDS:
        assert torch.equal(getattr(alone, name)[0], getattr(experts, name)[2])
    changed = experts.lora_up_a.detach().clone()
    experts.lora_up_a.data.zero_()
    experts.reset_parameters()
    assert torch.equal(experts.lora_up_a, changed)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_parts_are_those_of_whole_experts_and_their_outputs_add_up(activation: Activation) -> None:
    init = WeightInit(std=0.4, dtype=torch.float64)

    def part(index: int, parts: int) -> LoraExperts:
        base = Experts([0, 1], d_model=4, d_ff=5, init=init, shard=(index, parts), activation=activation)
        return LoraExperts(base, rank=2, scale=1.5)

    whole, parts = part(0, 1), [part(index, 2) for index in range(2)]
    fill_normal(whole.lora_up_b.data, 1, 0.5)
    fill_normal(whole.lora_down_b.data, 2, 0.5)
    for each in parts:
        assert torch.equal(each.lora_up_a, whole.lora_up_a)
        up, down = cut_of(each.lora_up_b), cut_of(each.lora_down_a)
        assert up is not None
        assert down is not None
        assert torch.equal(each.lora_down_a, whole.lora_down_a[:, :, down.start : down.stop])
        rows = torch.arange(len(whole.lora_up_b[0])).view(up.blocks, -1)[:, up.start : up.stop].flatten()
        each.lora_up_b.data.copy_(whole.lora_up_b[:, rows])
        each.lora_down_b.data.copy_(whole.lora_down_b)
        assert {name for name, place in each.places.items() if place.cut is not None} == {
            *("up", "down", "lora_up_b", "lora_down_a")
        }
    x = fill_normal(torch.empty(5, 4, dtype=torch.float64), 9, 1.0)
    with torch.no_grad():
        found = sum(each.forward(x, [3, 2])[0] for each in parts)
        assert difference(found, whole.forward(x, [3, 2])[0]) <= 1e-12
    assert all(place.cut is None for place in whole.places.values())
