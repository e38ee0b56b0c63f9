"""Room for rows, and the choices of gates that other libraries have, each against its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_models import EXPERTS, FF, D, assert_alike, gradients, tokens

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of
from moeclipse.moe.config import GateConfig
from moeclipse.moe.gate.capacity import drop_low_scores, drop_over_capacity, room_for
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks

COUNT = 24


def test_room_in_training_and_outside() -> None:
    config = GateConfig(top_k=2, capacity_factor=1.25, eval_capacity_factor=2.0, min_capacity=4)
    assert room_for(config, 64, 8, True) == math.ceil(1.25 * 128 / 8)
    assert room_for(config, 64, 8, False) == 32
    assert room_for(config, 3, 8, True) == 4, "never less than min_capacity"
    assert room_for(GateConfig(capacity_factor=1.0), 64, 8, False) == 16, "-1: as in training"
    assert room_for(GateConfig(capacity_factor=1.0, eval_capacity_factor=0.0), 64, 8, False) == 0
    assert room_for(GateConfig(), 64, 8, True) == 0


choices = st.lists(st.lists(st.integers(-1, 3), min_size=2, max_size=2), min_size=0, max_size=12)


@given(choices, st.integers(1, 4))
def test_by_position(rows: list[list[int]], capacity: int) -> None:
    """First choices in order, then second choices."""
    ids = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    expected, taken = ids.clone(), [0] * 4
    for choice in range(2):
        for row in range(len(rows)):
            expert = rows[row][choice]
            if expert >= 0:
                expected[row, choice] = expert if taken[expert] < capacity else -1
                taken[expert] += 1
    found = Tokens(mesh=Mesh.single(), first=0, total=len(rows))
    for on_rank in (False, True):
        assert torch.equal(drop_over_capacity(ids, 4, capacity, found, 0, on_rank=on_rank), expected)


@given(choices, st.integers(1, 4), st.randoms(use_true_random=False))
def test_by_score(rows: list[list[int]], capacity: int, random: Any) -> None:
    """Of each expert's rows those with the highest scores; of equal ones the first."""
    ids = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    scores = torch.tensor([random.randint(0, 4) for _ in range(ids.numel())], dtype=torch.float64).view(-1, 2)
    expected = ids.clone().flatten()
    for expert in range(4):
        wanted = [n for n in range(ids.numel()) if ids.view(-1)[n] == expert]
        wanted.sort(key=lambda n: (-float(scores.view(-1)[n]), n))
        for late in wanted[capacity:]:
            expected[late] = -1
    assert torch.equal(drop_low_scores(ids, scores, capacity), expected.view_as(ids))


def layer(gate: GateConfig, mesh: Mesh | None = None, **more: Any) -> MoE:
    return MoE(D, FF, EXPERTS, gate=gate, mesh=mesh, init_std=0.7, dtype=torch.float64, **more)


def by_definition(moe: MoE, x: torch.Tensor, capacity: int) -> torch.Tensor:
    """Plain torch: drop, renormalise what is left, one expert after the other."""
    config = moe.gate.config
    probs = (x @ moe.gate.weight.T).softmax(-1)
    scores, ids = probs.topk(2)
    if config.renormalise:
        scores = scores / (scores.sum(-1, keepdim=True) + config.renormalise_eps)
    kept = torch.zeros_like(ids, dtype=torch.bool)
    for expert in range(EXPERTS):
        places = [(k, t) for k in range(2) for t in range(len(x)) if ids[t, k] == expert]
        if config.drop_policy == "score":
            places.sort(key=lambda place: -float(scores[place[1], place[0]]))
        for k, t in places[:capacity]:
            kept[t, k] = True
    if config.renormalise_kept:
        scores = scores * kept
        scores = scores / scores.sum(-1, keepdim=True).clamp(min=1e-300)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for k in range(2):
            if kept[t, k]:
                up, down = moe.experts.up[ids[t, k]], moe.experts.down[ids[t, k]]
                gate, hidden = (up @ x[t]).chunk(2)
                out[t] = out[t] + scores[t, k] * (down @ (torch.nn.functional.silu(gate) * hidden))
    return out


OPTIONS: list[dict[str, Any]] = [
    {"drop_policy": "score", "capacity_over": "rank"},
    {"drop_policy": "score", "capacity_over": "rank", "renormalise_kept": True},
    {"renormalise_kept": True},
    {"renormalise": False, "renormalise_kept": True, "min_capacity": 5},
    {"renormalise_eps": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
@apart
def test_output_and_gradients_are_those_of_the_definition(options: dict[str, Any]) -> None:
    moe = layer(GateConfig(top_k=2, balance_loss=0.0, capacity_factor=0.5, **options))
    x = tokens(count=COUNT)
    weigh = tokens(1, count=COUNT)
    found = {}
    for way in ("layer", "definition"):
        moe.zero_grad()
        moe.gate.bias_E.zero_()
        capacity = room_for(moe.gate.config, COUNT, EXPERTS, True)
        y = moe(x) if way == "layer" else by_definition(moe, x, capacity)
        (y * weigh).sum().backward()
        found[way] = gradients(moe) | {"y": y.detach()}
    assert moe.last is not None
    assert moe.last.num_dropped > 0, "the test would not see what is dropped"
    assert_alike(found["layer"], found["definition"])


def on_each(mesh: Mesh, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """On two ranks, each counting its own tokens, a rank's output is that of a layer alone."""
    gate = GateConfig(top_k=2, balance_loss=0.0, capacity_factor=0.5, capacity_over="rank", **options)
    moe, alone = layer(gate, mesh), layer(gate)
    x = tokens(0, mesh.rank, COUNT)
    return {"y": moe(x).detach(), "alone": alone(x).detach()}


@pytest.mark.parametrize("options", [{"drop_policy": "score"}, {"renormalise_kept": True}])
def test_ranks_that_count_their_own_tokens(options: dict[str, Any]) -> None:
    for result in run_ranks(2, on_each, options):
        assert_alike({"y": result["y"]}, {"y": result["alone"]})


@apart
def test_a_second_expert_is_drawn_by_its_probability() -> None:
    gate = GateConfig(top_k=2, sample_second=True, balance_loss=0.0)
    moe = layer(gate)
    x = tokens()[:1].expand(4000, D)
    routing = moe.gate(x, Tokens(mesh=moe.mesh, first=0, total=4000))
    probs = routing.probs_TE[0].detach()
    first = int(probs.argmax())
    assert (routing.expert_ids_TK[:, 0] == first).all()
    drawn = torch.bincount(routing.expert_ids_TK[:, 1], minlength=EXPERTS) / 4000
    assert drawn[first] == 0
    rest = probs.clone()
    rest[first] = 0
    assert (drawn - rest / rest.sum()).abs().max() < 0.03
    chosen = probs[routing.expert_ids_TK]
    assert torch.allclose(routing.scores_TK, chosen / chosen.sum(-1, keepdim=True), rtol=1e-12)
    again = moe.gate(x, Tokens(mesh=moe.mesh, first=0, total=4000))
    assert torch.equal(again.expert_ids_TK, routing.expert_ids_TK), (
        "keyed, not drawn from anybody's generator"
    )
    best = moe.gate.eval()(x, Tokens(mesh=moe.mesh, first=0, total=4000))
    assert torch.equal(best.expert_ids_TK[0], probs.topk(2).indices)


@apart
def test_padding_outside_of_training_without_a_bound() -> None:
    moe = layer(GateConfig(top_k=2, capacity_factor=1.0, overflow="pad", eval_capacity_factor=0.0)).eval()
    dropless = layer(GateConfig(top_k=2)).eval()
    assert_alike({"y": moe(tokens()).detach()}, {"y": dropless(tokens()).detach()})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"drop_policy": "score", "capacity_factor": 1.0}, "needs gate.capacity_over = 'rank'"),
        (
            {"overflow": "pad", "capacity_factor": 1.0, "capacity_over": "rank"},
            "needs gate.capacity_over = 'all'",
        ),
        ({"eval_capacity_factor": -2.0}, "must not be negative, or be -1"),
        ({"min_capacity": -1}, "must not be negative"),
        ({"min_capacity": 4}, "needs gate.capacity_factor > 0"),
        ({"renormalise_kept": True}, "needs gate.capacity_factor > 0"),
        ({"renormalise_eps": -1.0}, "must not be negative"),
        ({"sample_second": True, "top_k": 3}, "needs gate.kind = 'softmax', gate.top_k = 2"),
    ],
)
def test_what_does_not_go_together_is_told(options: dict[str, Any], text: str) -> None:
    assert any(text in problem for problem in problems_of(GateConfig(**options), "gate."))
