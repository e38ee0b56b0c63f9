"""The topology-aware gate against brute force, in every gate, and in a layer on several simulated nodes."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_parity import GATES, compare, gradients, inputs, make

from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.gates import Gate, count_experts
from moeclipse.moe.gate.node_limit import limit_leaving, near_experts
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal
from moeclipse.testing.run_ranks import run_alone, run_ranks

T, D, E = 40, 6, 8
MESH = Mesh.single()
NEAR = torch.tensor([True, True, False, False, True, False, False, True])
KINDS = {name: config for name, config in GATES.items() if not config.capacity_factor}
KINDS["switch"] = GateConfig(kind="switch", top_k=1)


def brute_force(ids: Any, scores: Any, preference: Any, near: Any, share: Fraction, reroute: bool) -> Any:
    """By definition: one row at a time."""
    used = [(t, k) for t, row in enumerate(ids) for k, e in enumerate(row) if e >= 0]
    leaving = [(t, k) for t, k in used if not near[ids[t][k]]]
    leaving.sort(key=lambda place: -scores[place[0]][place[1]])  # stable: token by token, choice by choice
    result = [list(row) for row in ids]
    excess = leaving[math.floor(share * len(used)) :]
    for t, k in excess:
        result[t][k] = -1
    for t, k in sorted(excess):
        free = [e for e in range(len(near)) if near[e] and e not in result[t]]
        if reroute and free:
            result[t][k] = max(free, key=lambda e: (preference[t][e], -e))
    return result


@settings(deadline=None)
@given(data=st.data(), top_k=st.integers(1, 4), num_tokens=st.integers(0, 7), reroute=st.booleans())
def test_brute_force(data: st.DataObject, top_k: int, num_tokens: int, reroute: bool) -> None:
    num_experts = data.draw(st.integers(top_k, 6))
    places = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    gaps = st.lists(st.booleans(), min_size=top_k, max_size=top_k)
    row = st.tuples(places, gaps).map(lambda r: [-1 if gap else e for e, gap in zip(*r, strict=True)])
    few = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # few values: many ties

    def table(entry: Any, width: int) -> Any:
        return data.draw(st.lists(entry, min_size=num_tokens, max_size=num_tokens)), (num_tokens, width)

    ids, shape = table(row, top_k)
    scores, _ = table(st.lists(few, min_size=top_k, max_size=top_k), top_k)
    preference, wide = table(st.lists(few, min_size=num_experts, max_size=num_experts), num_experts)
    near = data.draw(st.lists(st.booleans(), min_size=num_experts, max_size=num_experts))
    share = data.draw(st.sampled_from(["0.0", "0.1", "0.14", "0.29", "0.5", "0.7", "0.999999", "1.0"]))
    found = limit_leaving(
        torch.tensor(ids, dtype=torch.int64).view(shape),
        torch.tensor(scores, dtype=torch.float64).view(shape),
        torch.tensor(preference, dtype=torch.float64).view(wide),
        torch.tensor(near),
        share=float(share),
        reroute=reroute,
    )
    assert found.tolist() == brute_force(ids, scores, preference, near, Fraction(share), reroute)


@pytest.mark.parametrize(
    ("share", "rows", "limit"), [(0.29, 100, 29), (0.1, 30, 3), (0.7, 10, 7), (0.34, 3, 1)]
)
def test_the_limit_is_a_whole_number_that_rounding_does_not_move(share: float, rows: int, limit: int) -> None:
    ids = torch.ones(rows, 1, dtype=torch.int64)
    scores = (torch.randperm(rows) / rows)[:, None]  # apart by more than what counts as equal
    near = torch.tensor([True, False])
    kept = limit_leaving(ids, scores, torch.rand(rows, 2), near, share=share, reroute=False)
    assert (kept >= 0).sum() == limit
    assert set(scores[kept >= 0].tolist()) == set(scores.flatten().topk(limit).values.tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("nudge", [-1, 0, 1])
def test_last_bits_do_not_decide_who_may_leave(dtype: torch.dtype, nudge: int) -> None:
    """Equal tokens differ in last bits from schedule to schedule: the first of them leaves in every one."""
    ids, near = torch.ones(4, 1, dtype=torch.int64), torch.tensor([True, False])
    scores = torch.tensor([[0.1], [0.7], [0.7], [0.2]], dtype=dtype)
    scores[2] *= 1 + 4 * nudge * torch.finfo(dtype).eps
    kept = limit_leaving(ids, scores, torch.rand(4, 2), near, share=0.25, reroute=False)
    assert kept.flatten().tolist() == [-1, 1, -1, -1]


def route(
    config: GateConfig, near: torch.Tensor | None = NEAR, dtype: torch.dtype = torch.float64, total: int = T
) -> tuple[Gate, Routing]:
    gate = Gate(config, d_model=D, num_experts=E, init=WeightInit(std=0.8, dtype=dtype))
    gate.near_E = near
    if config.kind == "noisy":
        fill_normal(gate.noise_weight.data, 9, 0.5)
    x = fill_normal(torch.empty(T, D, dtype=torch.float64), 4, 1.0)[:total].to(dtype)
    return gate, gate(x, Tokens(mesh=MESH, first=0, total=total))


def limited(config: GateConfig, **more: Any) -> GateConfig:
    return GateConfig(**{**vars(config), **more})


@pytest.mark.parametrize("excess", ["reroute", "drop"])
@pytest.mark.parametrize("name", KINDS)
def test_every_gate_keeps_the_best_and_never_exceeds_the_limit(name: str, excess: Any) -> None:
    config = limited(KINDS[name], max_leaving=0.2, excess=excess)
    _, free = route(config, near=None)
    _, bound = route(config)
    wanted, ids = free.expert_ids_TK, bound.expert_ids_TK
    leaves = (wanted >= 0) & ~NEAR[wanted.clamp(min=0)]
    rows = int((wanted >= 0).sum())
    limit = rows // 5
    stays_far = (ids >= 0) & ~NEAR[ids.clamp(min=0)]
    assert leaves.sum() > limit == stays_far.sum()
    assert free.scores_TK[stays_far].min() >= free.scores_TK[leaves & ~stays_far].max()
    assert torch.equal(ids[~leaves], wanted[~leaves]), "near choices are not touched"
    assert torch.equal(bound.load_E, free.load_E), "load counts what was wanted"
    assert bound.num_dropped == rows - (ids >= 0).sum()
    assert all(len(set(row)) == len(row) for row in ([e for e in r if e >= 0] for r in ids.tolist()))
    if excess == "drop":
        assert bound.num_dropped == leaves.sum() - limit
        assert torch.equal(bound.scores_TK, free.scores_TK), "dropping changes nobody's score"
    else:  # a row is dropped only where its token visits all near experts
        visits = torch.zeros(T, E + 1, dtype=torch.bool).scatter(1, torch.where(ids >= 0, ids, E), True)
        gave_up = (leaves & (ids < 0)).any(1)
        assert visits[:, :E][gave_up][:, NEAR].all()
        assert ((ids != wanted) & (ids >= 0)).any() or config.top_k == E


def test_scores_of_rerouted_rows_by_definition() -> None:
    config = GateConfig(kind="sigmoid", top_k=3, scale=2.5, max_leaving=0.1)
    gate, routing = route(config)
    probs = torch.sigmoid(fill_normal(torch.empty(T, D, dtype=torch.float64), 4, 1.0) @ gate.weight.T)
    best = probs.topk(3).indices
    ids = torch.where(routing.expert_ids_TK >= 0, routing.expert_ids_TK, best)
    chosen = probs.gather(1, ids)
    assert torch.allclose(routing.scores_TK, 2.5 * chosen / chosen.sum(1, keepdim=True), rtol=1e-14)
    assert (ids != best).any()


def test_a_bias_steers_where_excess_goes() -> None:
    config = GateConfig(kind="sigmoid", top_k=1, bias_rate=0.1, max_leaving=0.0)
    gate, _ = route(config)
    gate.bias_E[4] = 5.0
    gate.bias_E[2] = 9.0
    x = fill_normal(torch.empty(T, D, dtype=torch.float64), 4, 1.0)
    routing = gate(x, Tokens(mesh=MESH, first=0, total=T))
    assert routing.load_E.tolist() == [0, 0, T, 0, 0, 0, 0, 0], "all want expert 2, which is far"
    assert (routing.expert_ids_TK == 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [T, 0])
def test_low_precision_and_no_tokens(dtype: torch.dtype, total: int) -> None:
    for config in KINDS.values():
        _, bound = route(limited(config, max_leaving=0.3), dtype=dtype, total=total)
        ids = bound.expert_ids_TK
        far = ((ids >= 0) & ~NEAR[ids.clamp(min=0)]).sum()
        assert ids.shape == (total, config.top_k)
        assert far <= 3 * bound.load_E.sum() // 10


def test_all_experts_chosen_leaves_nowhere_to_go() -> None:
    _, bound = route(GateConfig(top_k=E, max_leaving=0.25))
    assert bound.num_dropped == T * E // 2 - T * E // 4
    _, nothing_near = route(GateConfig(top_k=2, max_leaving=0.25), near=torch.zeros(E, dtype=torch.bool))
    assert nothing_near.num_dropped == 2 * T - T // 2


def test_capacity_counts_what_was_rerouted() -> None:
    config = GateConfig(top_k=2, max_leaving=0.1, capacity_factor=0.8)
    _, bound = route(config)
    ids = bound.expert_ids_TK
    assert count_experts(ids, E).max() == bound.capacity == 8
    assert ((ids >= 0) & ~NEAR[ids.clamp(min=0)]).sum() <= 8


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_the_scores(name: str) -> None:
    run_alone(check_gradients, name)


def check_gradients(_: Mesh, name: str) -> None:
    gate, _ = route(limited(KINDS[name], max_leaving=0.2))
    x = fill_normal(torch.empty(6, D, dtype=torch.float64), 4, 1.0).requires_grad_()

    def scores(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        routing = torch.func.functional_call(
            gate, {"weight": weight}, (x, Tokens(mesh=MESH, first=0, total=6))
        )
        return routing.scores_TK * (routing.expert_ids_TK >= 0)

    assert torch.autograd.gradcheck(scores, (x, gate.weight), eps=1e-6)


class GivenIds(Gate):
    """A gate that is told which experts to take."""

    def forward(self, x_TD: torch.Tensor, tokens: Tokens) -> Routing:
        free = super().forward(x_TD, tokens)
        scores_TK = free.scores_TK
        if self.config.excess == "reroute":
            ids_TK = torch.where(self.given_TK >= 0, self.given_TK, free.expert_ids_TK)
            scores_TK = self._score(free.probs_TE, ids_TK) * self.config.scale
        return Routing(**{**vars(free), "expert_ids_TK": self.given_TK, "scores_TK": scores_TK})


def on_nodes(mesh: Mesh, gate: GateConfig, hosts: list[int], sizes: list[int], more: dict) -> tuple:
    mesh.hosts = tuple(hosts)
    moe = make(gate, 8, 0, mesh, **more)
    first = sum(sizes[: mesh.rank])
    x = inputs(sum(sizes))[0][first : first + sizes[mesh.rank]]
    ids = moe.gate(x, Tokens(mesh=mesh, first=first, total=sum(sizes), step=5)).expert_ids_TK
    return gradients(moe, mesh, sizes), ids


def with_given_ids(mesh: Mesh, gate: GateConfig, ids: torch.Tensor) -> dict:
    moe = make(gate, 8, 0, mesh)
    moe.gate.__class__ = GivenIds
    moe.gate.given_TK = ids
    return gradients(moe, mesh, [len(ids)])


@pytest.mark.parametrize("excess", ["reroute", "drop"])
@pytest.mark.parametrize(
    ("hosts", "dp", "more"),
    [
        ([0, 0, 1, 1], 1, {}),
        ([0, 1, 0, 2], 1, {"exchange": {"schedule": "smart", "chunks": 2, "shadow": (1, 6)}}),
        ([0, 1, 1, 0], 2, {}),
    ],
)
def test_a_layer_on_several_nodes(excess: Any, hosts: list[int], dp: int, more: dict) -> None:
    gate = GateConfig(top_k=3, scale=1.5, max_leaving=0.2, excess=excess)
    sizes = [7, 0, 9, 4]
    outcomes = run_ranks(4, on_nodes, gate, hosts, sizes, more, dp=dp)
    ids = [outcome[1] for outcome in outcomes]
    reference = run_alone(with_given_ids, gate, torch.cat(ids))
    compare([outcome[0] for outcome in outcomes], reference, dp, 4 // dp)
    ep = 4 // dp
    for rank, mine in enumerate(ids):
        owners = [rank // ep * ep + owner for owner in Placement.contiguous(8, ep).primary]
        far = [e for e in mine.flatten().tolist() if e >= 0 and hosts[owners[e]] != hosts[rank]]
        assert len(far) <= 3 * sizes[rank] // 5
    if excess == "drop":
        assert reference["dropped"] > 0
    elif hosts == [0, 0, 1, 1]:
        assert reference["dropped"] == 0, "four experts are near: a token that wants three always finds one"


def one_node(mesh: Mesh) -> bool:
    return make(GateConfig(top_k=2, max_leaving=0.0), 8, 0, mesh).gate.near_E is None


def test_on_one_node_nothing_is_limited() -> None:
    assert run_ranks(2, one_node) == [True, True]
    assert one_node(MESH)


def test_near_is_where_the_primary_is() -> None:
    placement = Placement(((0, 1), (2, 1), (3,)), (0, 1, 1, 2))
    mesh: Any = SimpleNamespace(hosts=(0, 1, 1), tp=1, tp_index=0)
    found = [
        near_experts(mesh, Group(name="experts", ranks=(0, 1, 2), index=i), placement, torch.device("cpu"))
        for i in range(3)
    ]
    expected = [[True, False, False, False], [False, True, True, True], [False, True, True, True]]
    assert [near.tolist() for near in found if near is not None] == expected


def test_tp_ranks_that_share_tokens_route_alike() -> None:
    """tp groups (0, 1) and (2, 3); rank 1 stands on another host than rank 0."""
    hosts = (0, 1, 0, 0)
    placement = Placement.contiguous(2, 2)
    for rank in (0, 1):
        mesh: Any = SimpleNamespace(hosts=hosts, tp=2, tp_index=rank)
        group = Group(name="shard_experts", ranks=(rank, rank + 2), index=0)
        near = near_experts(mesh, group, placement, torch.device("cpu"), sharded=True)
        assert near is not None
        assert near.tolist() == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reroute", [True, False])
def test_on_cuda_nothing_waits_and_the_answer_is_that_of_the_cpu(reroute: bool) -> None:
    ids = torch.rand(500, E).topk(3).indices
    tables = (ids, torch.rand(500, 3), torch.rand(500, E), NEAR)
    expected = limit_leaving(*tables, share=0.14, reroute=reroute)
    on_device = [table.cuda() for table in tables]
    limit_leaving(*on_device, share=0.14, reroute=reroute)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = limit_leaving(*on_device, share=0.14, reroute=reroute)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), expected)


@given(st.data(), st.sampled_from([(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2)]))
def test_gate_split_and_planner_agree_on_what_leaves_a_node(
    data: st.DataObject, hosts: tuple[int, ...]
) -> None:
    """One source of truth, the hosts of the mesh: rows that a gate counts as leaving are those that cross."""
    counts_PE = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=8), min_size=4, max_size=4))
    )
    placement = Placement.contiguous(8, 4)
    leaving = 0
    for rank in range(4):
        mesh: Any = SimpleNamespace(hosts=hosts, tp=1, tp_index=0)
        near_E = near_experts(
            mesh, Group(name="experts", ranks=(0, 1, 2, 3), index=rank), placement, torch.device("cpu")
        )
        assert near_E is not None
        leaving += int(counts_PE[rank][~near_E.numpy()].sum())
    sent_PP = split_rows(counts_PE, ReplicaTable.of(placement), hosts).sent_PP
    nodes = np.array(hosts)
    assert sent_PP[nodes[:, None] != nodes].sum() == leaving
    costs = PlacementCosts.from_shapes(d_model=8, d_ff=8)
    share = score(placement, counts_PE, costs, node_P=hosts).cross_share
    assert share * counts_PE.sum() == pytest.approx(leaving)
