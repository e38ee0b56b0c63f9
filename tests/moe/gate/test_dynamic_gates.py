"""Gates that let tokens choose how many experts they visit: against their definition, and over ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.transport import Transport
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.dynamic_gates import GAP_UNIT, DynamicChoice, places_in_use, places_in_use_reference
from moeclipse.moe.gate.gates import Gate
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.standalone import aux_loss, sync_gradients
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal
from moeclipse.testing.run_ranks import run_ranks

T, D, E = 48, 6, 8
MESH = Mesh.single()
RULES = {
    "gap": GateConfig(choose="gap", top_k=3, threshold=0.12),
    "top_p": GateConfig(choose="top_p", top_k=4, top_p=0.55),
    "threshold": GateConfig(choose="threshold", top_k=4, threshold=0.125),
    "mean": GateConfig(choose="top_p", top_k=4, top_p=0.6, mean_experts=2.2),
    "sigmoid": GateConfig(choose="top_p", kind="sigmoid", top_k=3, top_p=0.3, bias_rate=0.01),
    "raw": GateConfig(choose="threshold", top_k=4, threshold=0.15, renormalise=False, scale=1.5),
}


def inputs(total: int = T) -> torch.Tensor:
    return fill_normal(torch.empty(total, D, dtype=torch.float64), 4, 1.0)


def make(config: GateConfig) -> Gate:
    return Gate(config, d_model=D, num_experts=E, init=WeightInit(std=0.8, dtype=torch.float64))


def tokens() -> Tokens:
    return Tokens(mesh=MESH, first=0, total=T)


def limit_of(config: GateConfig) -> float:
    return config.top_p if config.choose == "top_p" else config.threshold


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), max_size=6),
    st.sampled_from(["gap", "top_p", "threshold"]),
    st.floats(0, 1),
)
def test_places_are_those_of_the_definition(rows: list[list[float]], choose: str, limit: float) -> None:
    rows = [sorted(row, reverse=True) for row in rows]
    share_TK = torch.tensor(rows, dtype=torch.float64).view(-1, 3)
    slow = places_in_use_reference(share_TK, choose, limit)
    fast = places_in_use(share_TK, choose, limit)
    border = (share_TK[:, :1] - share_TK - limit).abs() < 1e-12
    border |= (share_TK.cumsum(1) - share_TK - limit).abs() < 1e-12
    assert torch.equal(fast | border, slow | border)
    assert fast[:, 0].all()


def slow_scores(config: GateConfig, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Scores by token and expert [T, E], from the definition alone."""
    logits = x @ weight.T
    values = torch.sigmoid(logits) if config.kind == "sigmoid" else logits.softmax(-1)
    rows = []
    for value in values:
        share = (value / value.sum()).detach()
        order = value.detach().argsort(descending=True)[: config.top_k]
        (used,) = places_in_use_reference(share[order][None], config.choose, limit_of(config)).tolist()
        chosen = [int(expert) for expert, keep in zip(order, used, strict=True) if keep]
        total = sum(value[expert] for expert in chosen) if config.renormalise else 1.0
        row = [value[e] / total if e in chosen else value[e] * 0 for e in range(E)]
        rows.append(torch.stack(row))
    return torch.stack(rows) * config.scale


def fast_scores(gate: Gate, x: torch.Tensor) -> torch.Tensor:
    routing = gate(x, tokens())
    ids = torch.where(routing.expert_ids_TK >= 0, routing.expert_ids_TK, E)
    return torch.zeros(len(x), E + 1, dtype=x.dtype).scatter_add(1, ids, routing.scores_TK)[:, :E]


@pytest.mark.parametrize("rule", RULES)
def test_scores_and_gradients_are_those_of_a_slow_reference(rule: str) -> None:
    config = RULES[rule]
    gate, x = make(config), inputs().requires_grad_()
    found, expected = fast_scores(gate, x), slow_scores(config, gate.weight, x)
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-15)
    used = (found > 0).sum(1)
    assert used.min() >= 1
    assert len(used.unique()) > 1, "the number of experts must vary in this test"
    probe = fill_normal(torch.empty_like(found), 8, 1.0)
    grads = torch.autograd.grad((found * probe).sum(), [x, gate.weight])
    slow = torch.autograd.grad((expected * probe).sum(), [x, gate.weight])
    for a, b in zip(grads, slow, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize("rule", ["gap", "sigmoid", "raw"])
def test_gradcheck(rule: str) -> None:
    gate = make(RULES[rule]).eval()
    x = inputs()[:6].requires_grad_()
    assert torch.autograd.gradcheck(lambda value: fast_scores(gate, value), (x,))


def test_the_largest_gap_follows_the_mean_gap() -> None:
    config = RULES["gap"]
    gate, expected = make(config), config.threshold
    for _ in range(30):
        routing = gate(inputs(), tokens())
        best = routing.probs_TE.detach().topk(2).values
        gap = float((best[:, 0] - best[:, 1]).mean())
        gate.rebalance(routing.load_E, gate.take_seen())
        expected = 0.95 * expected + 0.04 * gap
        assert gate.dynamic is not None
        assert abs(float(gate.dynamic.limit) - expected) < 2 * GAP_UNIT
    for _ in range(300):
        gate(inputs(), tokens())
        gate.rebalance(routing.load_E, gate.take_seen())
    assert math.isclose(float(gate.dynamic.limit), 0.8 * gap, rel_tol=1e-5)
    assert "dynamic.limit" in gate.state_dict()


@pytest.mark.parametrize("target", [1.3, 2.2, 3.5])
@pytest.mark.parametrize("spread", [0.05, 0.8])
def test_the_controller_holds_the_mean(target: float, spread: float) -> None:
    """Also where the gate knows nothing yet, and all tokens would take or leave a place together."""
    gate = make(dataclasses.replace(RULES["mean"], mean_experts=target))
    fill_normal(gate.weight.data, 5, spread)
    means = []
    for step in range(120):
        x = fill_normal(torch.empty(T, D, dtype=torch.float64), step, 1.0)
        routing = gate(x, tokens())
        means.append(int(routing.load_E.sum()) / T)
        gate.rebalance(routing.load_E, gate.take_seen())
    assert abs(sum(means[60:]) / 60 - target) < 0.05


@pytest.mark.parametrize(("top_k", "num_experts"), [(2, 8), (4, 8), (8, 16), (8, 64)])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_any_mean_is_reached(top_k: int, num_experts: int, part: float, spread: float) -> None:
    """Also by gates that are so sure of themselves that some places hold a millionth of a token."""
    target = 1 + part * (top_k - 1)
    choice = DynamicChoice(GateConfig(choose="top_p", top_k=top_k, top_p=0.6, mean_experts=target)).train()
    rows = []
    for step in range(250):
        logits = fill_normal(torch.empty(128, num_experts), step, spread)
        used_TK = choice(logits.softmax(-1).topk(top_k).values)
        rows.append(int(used_TK.sum()) / 128)
        choice.adapt(choice.take_seen())
    assert abs(sum(rows[100:]) / 150 / target - 1) < 0.03


@pytest.mark.parametrize("target", [1.5, 2.2])
@pytest.mark.parametrize("growth", [1.003, 1.01])
def test_the_controller_holds_the_mean_while_the_gate_drifts(target: float, growth: float) -> None:
    """A gate that grows surer at every step: the mean of the last steps is off by less than one per cent."""
    gate = make(dataclasses.replace(RULES["mean"], mean_experts=target))
    fill_normal(gate.weight.data, 5, 0.2)
    means = []
    for step in range(160):
        gate.weight.data *= growth
        x = fill_normal(torch.empty(512, D, dtype=torch.float64), step, 1.0)
        routing = gate(x, Tokens(mesh=MESH, first=0, total=512))
        means.append(int(routing.load_E.sum()) / 512)
        gate.rebalance(routing.load_E, gate.take_seen())
    last = means[80:]
    assert abs(sum(last) / len(last) / target - 1) < 0.01
    assert gate.dynamic is not None
    assert float(gate.dynamic.trend) != 0


def test_a_state_without_a_trend_is_read() -> None:
    gate, other = make(RULES["mean"]), make(RULES["mean"])
    old = {name: value for name, value in gate.state_dict().items() if not name.endswith("trend")}
    assert other.dynamic is not None
    other.dynamic.trend.fill_(3.0)
    other.load_state_dict(old)
    assert float(other.dynamic.trend) == 0.0


def test_an_evaluation_moves_nothing() -> None:
    gate = make(RULES["mean"]).eval()
    routing = gate(inputs(), tokens())
    assert gate.take_seen().tolist() == [0, 0, 0]
    gate.rebalance(routing.load_E, gate.take_seen())
    assert gate.dynamic is not None
    assert float(gate.dynamic.limit) == 0.6


def test_capacity_makes_room_for_the_mean() -> None:
    config = dataclasses.replace(RULES["mean"], capacity_factor=0.6)
    routing = make(config)(inputs(), tokens())
    assert routing.capacity == math.ceil(0.6 * 2.2 * T / E)
    ids = routing.expert_ids_TK[routing.expert_ids_TK >= 0]
    assert ids.bincount().max() <= routing.capacity
    assert routing.num_dropped > 0
    free = make(RULES["mean"])(inputs(), tokens())
    assert torch.equal(routing.scores_TK, free.scores_TK), "what is dropped keeps its share of the scores"


@pytest.mark.parametrize("excess", ["reroute", "drop"])
def test_the_topology_gate_sees_the_places_in_use(excess: Any) -> None:
    config = dataclasses.replace(RULES["top_p"], max_leaving=0.25, excess=excess)
    free, gate = make(RULES["top_p"])(inputs(), tokens()), make(config)
    gate.near_E = torch.arange(E) < 4
    routing = gate(inputs(), tokens())
    used = routing.expert_ids_TK >= 0
    leaving = int((routing.expert_ids_TK >= 4).sum())
    wanted = int((free.expert_ids_TK >= 0).sum())
    assert leaving == math.floor(0.25 * wanted)
    assert not (used & (free.expert_ids_TK < 0)).any(), "a place that the token left free stays free"
    if excess == "reroute":
        assert torch.allclose(routing.scores_TK.sum(1), torch.ones(T, dtype=torch.float64), rtol=1e-12)


class CountingTransport:
    """Notes how many rows leave this rank, and passes everything on."""

    def __init__(self, inner: Transport, me: int) -> None:
        self.inner, self.me, self.rows = inner, me, 0

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        if rows.dim() == 2 and rows.shape[1] == D:
            self.rows += sum(send_counts) - send_counts[self.me]
        return self.inner.all_to_all(rows, send_counts, receive_counts, label, out)


def rows_on_the_wire(mesh: Mesh, gate: GateConfig) -> tuple[int, int]:
    moe = MoE(D, 8, E, gate=gate, mesh=mesh, init_std=0.8, dtype=torch.float64)
    wire = CountingTransport(moe.dispatcher.transport, mesh.rank)
    moe.dispatcher = dataclasses.replace(moe.dispatcher, transport=wire)
    x = inputs(T * mesh.num_ranks)[mesh.rank * T : (mesh.rank + 1) * T].requires_grad_()
    moe(x).sum().backward()
    return wire.rows, int(moe.load_E.sum())


def test_rows_that_are_not_routed_do_not_travel() -> None:
    every = sum(rows for rows, _ in run_ranks(2, rows_on_the_wire, GateConfig(top_k=4)))
    for rule in ("gap", "top_p", "threshold"):
        config = dataclasses.replace(RULES[rule], top_k=4)
        results = run_ranks(2, rows_on_the_wire, config)
        rows, routed = sum(rows for rows, _ in results), sum(load for _, load in results)
        # Forward and backward, there and back; a token's rows to one rank share a vector.
        assert rows < every
        assert routed < 4 * 2 * T
        assert rows <= 4 * routed


def standalone(mesh: Mesh) -> list[float]:
    """In somebody else's loop: a limit after each of three steps."""
    moe = MoE(D, 8, E, gate=RULES["mean"], mesh=mesh, init_std=0.8, dtype=torch.float64)
    limits = []
    for _ in range(3):
        part = T // mesh.num_ranks
        x = inputs()[mesh.rank * part : (mesh.rank + 1) * part]
        (moe(x).sum() + aux_loss(moe)).backward()
        sync_gradients(moe)
        limits.append(float(moe.gate.dynamic.limit))
        moe.zero_grad()
    return limits


def test_limits_move_in_somebody_elses_loop() -> None:
    alone, *ranks = run_ranks(1, standalone) + run_ranks(2, standalone)
    assert len(set(alone)) == 3
    assert ranks == [alone, alone]
