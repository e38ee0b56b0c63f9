"""Types: casts that leave gates alone, autocast as torch's layers have it, mixtures that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_models import EXPERTS, FF, KINDS, D, layer, tokens
from torch import nn

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(top_k=2, choose="gap", bias_rate=0.001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@apart
def test_a_cast_leaves_biases_limits_and_counters_as_they_are(dtype: torch.dtype) -> None:
    moe = MoE(D, FF, EXPERTS, gate=GATE)
    exact = torch.linspace(-1, 1, EXPERTS) / 3
    with torch.no_grad():
        moe.gate.bias_E.copy_(exact)
        moe.gate.dynamic.limit.fill_(1 / 3)
    moe.to(dtype)
    assert moe.experts.up.dtype == moe.gate.weight.dtype == dtype
    assert torch.equal(moe.gate.bias_E, exact)
    assert moe.gate.dynamic.limit.dtype == torch.float64
    assert float(moe.gate.dynamic.limit) == 1 / 3
    assert moe.load_E.dtype == torch.int64
    y = moe(tokens().to(dtype))
    assert y.dtype == dtype
    moe.double()
    assert moe.gate.bias_E.dtype == torch.float64, "gates of float64 models compute in float64"
    assert torch.equal(moe.gate.bias_E.float(), exact)


class PlainMoE(nn.Module):
    """The layer in torch's own operations: all experts for all tokens, weighted."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moe = self.moe
        with torch.autocast("cpu", enabled=False):
            probs = (x.float() @ moe.gate.weight.t()).softmax(-1)
            scores, ids = probs.topk(2)
            weight = torch.zeros_like(probs).scatter(1, ids, scores / scores.sum(-1, keepdim=True))
        parts = []
        for up, down in zip(moe.experts.up, moe.experts.down, strict=True):
            gate, hidden = nn.functional.linear(x, up).chunk(2, -1)
            parts.append(nn.functional.linear(nn.functional.silu(gate) * hidden, down))
        return (torch.stack(parts, 1).float() * weight[:, :, None]).sum(1)


def under_autocast(mesh: Mesh, given: torch.dtype, more: dict[str, Any]) -> None:
    moe = MoE(D, FF, EXPERTS, top_k=2, init_std=0.5, mesh=mesh if mesh.num_ranks > 1 else None, **more)
    x = tokens(rank=mesh.rank, count=40).to(given).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16, "as nn.Linear answers"
    assert x.grad.dtype == given
    assert all(p.grad is not None and p.grad.dtype == p.dtype == torch.float32 for p in moe.parameters())
    with torch.no_grad():  # rounding never changes who is chosen
        assert torch.equal(moe.gate(x.detach(), fake_tokens(moe, x)).expert_ids_TK, chosen(moe, x))
    if mesh.num_ranks == 1:
        found = {name: p.grad.clone() for name, p in moe.named_parameters()}
        moe.zero_grad()
        reference = PlainMoE(moe)
        again = x.detach().clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = reference(again)
        z.float().square().sum().backward()
        assert difference(y.float(), z) < 0.02
        for name, p in moe.named_parameters():
            assert difference(found[name], p.grad) < 0.03, name


def fake_tokens(moe: MoE, x: torch.Tensor) -> Any:
    from moeclipse.moe.tokens import Tokens

    return Tokens(mesh=moe.mesh, first=0, total=len(x))


def chosen(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return moe.gate(x.detach(), fake_tokens(moe, x)).expert_ids_TK


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_on_one_rank(given: torch.dtype) -> None:
    run_alone(under_autocast, given, {})


@pytest.mark.parametrize(
    "exchange", [{}, {"schedule": "smart", "group_size": 1, "chunks": 2}, {"shadow": (0,)}]
)
def test_autocast_on_two_ranks(exchange: dict[str, Any]) -> None:
    run_ranks(2, under_autocast, torch.float32, {"exchange": exchange, "num_shared_experts": 1})


@pytest.mark.parametrize("kind", KINDS)
@apart
def test_autocast_never_rounds_float64(kind: str) -> None:
    moe, x = layer(kind, num_shared_experts=1), tokens()
    expected = moe(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = moe(x)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)
    found.sum().backward()


class Mlp(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@apart
def test_modules_under_autocast_do_as_they_do_elsewhere() -> None:
    moe = MoE(D, FF, EXPERTS, experts=Mlp)
    x = tokens().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.experts.parameters())
    assert difference(y.float(), moe(x)) < 0.05


@pytest.mark.parametrize("shared", [0, 1])
@apart
def test_a_mixture_of_types_says_what_to_do(shared: int) -> None:
    moe = MoE(D, FF, EXPERTS, num_shared_experts=shared)
    with pytest.raises(
        ConfigError, match=r"got bfloat16 tokens.*float32 weights.*torch.autocast\('cpu'.*moe.to"
    ):
        moe(tokens().bfloat16())
