"""Each gate against its definition, and what it promises about layouts and randomness."""

from __future__ import annotations

import math

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.gates import Gate, drop_over_capacity
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal

T, D, E = 64, 6, 8
MESH = Mesh.single()


def inputs(total: int = T) -> torch.Tensor:
    return fill_normal(torch.empty(total, D, dtype=torch.float64), 4, 1.0)


def route(
    config: GateConfig, x: torch.Tensor | None = None, step: int = 0, train: bool = True, first: int = 0
):
    gate = Gate(config, d_model=D, num_experts=E, init=WeightInit(std=0.8, dtype=torch.float64))
    if config.kind == "noisy":
        fill_normal(gate.noise_weight.data, 9, 0.5)
    x = inputs() if x is None else x
    return gate, gate.train(train)(x, Tokens(mesh=MESH, first=first, total=T, step=step))


def test_softmax_is_top_k_renormalised() -> None:
    gate, routing = route(GateConfig(top_k=3))
    probs = (inputs() @ gate.weight.T).softmax(-1)
    best = probs.topk(3).values
    assert torch.equal(routing.expert_ids_TK, probs.topk(3).indices)
    assert torch.allclose(routing.scores_TK, best / best.sum(-1, keepdim=True), rtol=1e-14)
    assert routing.load_E.sum() == 3 * T
    _, raw = route(GateConfig(top_k=3, renormalise=False, scale=2.0))
    assert torch.allclose(raw.scores_TK, 2 * best, rtol=1e-14)


def test_groups_limit_the_choice() -> None:
    config = GateConfig(kind="sigmoid", top_k=2, num_groups=4, top_groups=1)
    gate, routing = route(config)
    scores = torch.sigmoid(inputs() @ gate.weight.T).unflatten(1, (4, 2))
    best = scores.sum(-1).argmax(-1)  # two experts in a group: its best two are all of it
    assert torch.equal(routing.expert_ids_TK // 2, best[:, None].expand(-1, 2))
    _, by_max = route(GateConfig(top_k=2, num_groups=2, top_groups=1, group_score="max"))
    assert (by_max.expert_ids_TK // 4 == by_max.expert_ids_TK[:, :1] // 4).all()


def test_the_bias_steers_the_choice_and_never_the_score() -> None:
    gate, before = route(GateConfig(kind="sigmoid", top_k=2, bias_rate=0.02, renormalise=False))
    gate.rebalance(before.load_E)
    expected = 0.02 * torch.sign(before.load_E.double().mean() - before.load_E)
    assert torch.equal(gate.bias_E, expected)
    for _ in range(15):
        after = gate(inputs(), Tokens(mesh=MESH, first=0, total=T))
        gate.rebalance(after.load_E)
    assert after.load_E.double().std() < 0.5 * before.load_E.double().std()
    plain = torch.sigmoid(inputs() @ gate.weight.T).gather(1, after.expert_ids_TK)
    assert torch.allclose(after.scores_TK, plain, rtol=1e-14)


def test_switch_keeps_capacity_in_token_order() -> None:
    _, free = route(GateConfig(kind="switch", top_k=1))
    _, bound = route(GateConfig(kind="switch", top_k=1, capacity_factor=0.5))
    capacity = math.ceil(0.5 * T / E)
    assert bound.capacity == capacity
    seen = [0] * E
    for wanted, got in zip(
        free.expert_ids_TK[:, 0].tolist(), bound.expert_ids_TK[:, 0].tolist(), strict=True
    ):
        assert got == (wanted if seen[wanted] < capacity else -1)
        seen[wanted] += 1
    assert torch.equal(free.load_E, bound.load_E), "load counts what was wanted"
    assert bound.num_dropped == sum(max(0, count - capacity) for count in seen) > 0


def test_first_choices_come_before_all_second_choices() -> None:
    ids = torch.tensor([[1, 0], [2, 0], [0, 1], [0, 2]])
    kept = drop_over_capacity(ids, 3, 2, Tokens(mesh=MESH, first=0, total=4), 0)
    assert kept.tolist() == [[1, -1], [2, -1], [0, 1], [0, 2]]


def test_gshard_takes_the_second_with_twice_its_score() -> None:
    config = GateConfig(kind="gshard", top_k=2)
    _, sure = route(config, train=False)
    assert (sure.expert_ids_TK >= 0).all()
    taken = torch.stack([route(config, step=step)[1].expert_ids_TK[:, 1] >= 0 for step in range(400)])
    chance = (2 * sure.scores_TK[:, 1]).clamp(max=1)
    assert (taken.double().mean(0) - chance).abs().max() < 0.12  # five standard deviations
    assert torch.equal(taken[:, chance == 1].all(0), torch.ones_like(chance[chance == 1], dtype=torch.bool))


@pytest.mark.parametrize("kind", ["gshard", "noisy"])
def test_randomness_is_keyed_by_step_and_global_token(kind: str) -> None:
    config = GateConfig(kind=kind, top_k=2)
    _, whole = route(config, step=3)
    _, again = route(config, step=3)
    _, other = route(config, step=4)
    _, part = route(config, inputs()[20:50], step=3, first=20)
    assert torch.equal(whole.expert_ids_TK, again.expert_ids_TK)
    assert not torch.equal(whole.expert_ids_TK, other.expert_ids_TK)
    assert torch.equal(whole.expert_ids_TK[20:50], part.expert_ids_TK)


def test_noise_stops_in_evaluation() -> None:
    gate, routing = route(GateConfig(kind="noisy", top_k=2), train=False)
    assert torch.equal(routing.expert_ids_TK, (inputs() @ gate.weight.T).topk(2).indices)
