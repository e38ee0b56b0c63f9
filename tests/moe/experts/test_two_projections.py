"""Experts of every style, cut and padded: gradients equal autograd, on one rank and many, by every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_kinds import D, built_in, normal
from layer_parity import compare, gradients, inputs, make

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.two_projections import Experts, PadToCapacity
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.activation import ACTIVATIONS
from moeclipse.ops.grouped_experts import grouped_experts_reference
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(top_k=3)


def build(
    mesh: Mesh, style: dict[str, Any], exchange: dict[str, Any] | None = None, fused: bool = False
) -> MoE:
    moe = make(GATE, 8, 1, mesh, exchange=exchange, **style)
    moe.fused = fused
    if style.get("expert_bias"):
        with torch.no_grad():
            for experts in (moe.experts, moe.shared):
                for name in ("up_bias", "down_bias"):
                    for expert, bias in zip(experts.ids, getattr(experts, name), strict=True):
                        fill_normal(bias, key_of(name, expert), 0.5)
    return moe


def run_style(
    mesh: Mesh, style: dict[str, Any], sizes: list[int], exchange: dict[str, Any] | None, fused: bool
) -> dict[str, Any]:
    return gradients(build(mesh, style, exchange, fused), mesh, sizes)


def by_autograd(mesh: Mesh, style: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """The same layer with its experts computed one after the other by plain operations."""
    moe = build(mesh, style)
    x, d_y = inputs(sum(sizes))
    x.requires_grad_()
    tokens = Tokens(mesh=mesh, first=0, total=len(x), step=5)
    routing = moe.gate(x, tokens)
    activation = style["activation"]
    ids, scores = routing.expert_ids_TK, routing.scores_TK
    y = grouped_experts_reference(x, scores, ids, *moe.experts.weights, activation=activation)
    ones = torch.ones(len(x), 1, dtype=x.dtype)
    shared = grouped_experts_reference(x, ones, ones.long() * 0, *moe.shared.weights, activation=activation)
    report = moe.report(routing, moe.gather_loads([routing], tokens).total(), tokens)
    (((y + shared) * d_y).sum() + report.aux_loss).backward()
    return {"y": (y + shared).detach(), "dx": x.grad} | {n: p.grad for n, p in moe.named_parameters()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_rank_equals_autograd(activation: str, bias: bool, fused: bool) -> None:
    style = {"activation": activation, "expert_bias": bias}
    expected = run_alone(by_autograd, style, [13])
    found = run_alone(run_style, style, [13], None, fused)
    for name, value in expected.items():
        assert difference(found[name], value) <= 1e-12, name


@pytest.mark.parametrize(
    ("activation", "exchange", "fused"),
    [
        ("relu2", {}, True),
        ("geglu", {"schedule": "smart", "group_size": 1, "chunks": 2}, True),
        ("gelu", {"schedule": "smart", "group_size": 1, "chunks": 3, "shadow": (0, 5)}, False),
    ],
    ids=["blocking", "smart", "shadows"],
)
def test_several_ranks(activation: str, exchange: dict[str, Any], fused: bool) -> None:
    style, sizes = {"activation": activation, "expert_bias": True}, [5, 0, 9, 4]
    expected = run_alone(run_style, style, [sum(sizes)], None, False)
    compare(run_ranks(4, run_style, style, sizes, exchange, fused), expected, 1, 4)


def with_sharded_bias(mesh: Mesh) -> str:
    try:
        MoE(8, 8, 2, expert_bias=True, expert_tp="sharded", mesh=mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_bias_cannot_be_sharded_over_several_ranks() -> None:
    assert with_sharded_bias(Mesh.single()) == ""
    for told in run_ranks(2, with_sharded_bias, tp=2):
        assert "moe.expert_bias needs moe.expert_tp = 'folded' with parallel.tp (2)" in told


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_parts_of_the_hidden_width_add_up(activation: Any) -> None:
    """As tensor-parallel ranks hold them: outputs and gradients of rows are sums."""
    init = WeightInit(std=0.5, dtype=torch.float64)
    given = {"d_model": D, "d_ff": 8, "init": init, "activation": activation}
    whole, parts = Experts((2, 5), **given), [Experts((2, 5), shard=(i, 2), **given) for i in range(2)]
    x, d_y, counts = normal(7, D, key=1), normal(7, D, key=2), [3, 4]
    with torch.no_grad():
        (y, d_x), *shares = (
            (y, experts.dgrad(d_y, saved)[0])
            for experts in (whole, *parts)
            for y, saved in [experts.forward(x, counts)]
        )
    assert difference(sum(share[0] for share in shares), y) <= 1e-14
    assert difference(sum(share[1] for share in shares), d_x) <= 1e-14
    assert torch.equal(torch.cat([part.down for part in parts], 2), whole.down)


def test_padded_experts_compute_capacity_rows_whoever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, computed = built_in(), []
    plain = experts.forward

    def noted(x: torch.Tensor, counts: Any) -> Any:
        computed.append((list(counts), (x == 0).all(1).tolist()))
        return plain(x, counts)

    monkeypatch.setattr(experts, "forward", noted)
    padded, x, counts = PadToCapacity(experts, 3), normal(4, D, key=1), [1, 0, 3]
    with torch.no_grad():
        y, saved = padded.forward(x, counts)
        d_x, pending = padded.dgrad(y, saved)
        assert computed == [([3, 3, 3], [False, True, True, True, True, True, False, False, False])]
        expected, kept = plain(x, counts)
        d_expected, later = experts.dgrad(expected, kept)
        for one, other in zip(padded.wgrad([pending]), experts.wgrad([later]), strict=True):
            assert difference(one, other) <= 1e-14
    assert difference(y, expected) <= 1e-14
    assert difference(d_x, d_expected) <= 1e-14
    assert torch.equal(padded.flatten([1]), experts.flatten([1]))
