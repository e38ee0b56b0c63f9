"""Activations and biases of experts: gradients equal autograd, on one rank and on many, by every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_layer import compare, gradients, inputs, make

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
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
    report = moe.report(routing, moe.gather_loads([routing], tokens), tokens)
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
