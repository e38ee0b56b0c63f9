"""Scores that multiply what goes into experts: against the definition, on any ranks, for any experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_models import EXPERTS, FF, KINDS, D, assert_alike, gradients, tokens

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(kind="sigmoid", top_k=2, renormalise=False, balance_loss=0.0)
COUNT = 10


def made(kind: str, mesh: Mesh | None = None, **exchange: Any) -> MoE:
    options: dict[str, Any] = {"init_std": 0.5, "dtype": torch.float64, **KINDS[kind]}
    moe = MoE(D, FF, EXPERTS, gate=GATE, score_input=True, mesh=mesh, exchange=exchange, **options)
    moe.fused = True if kind == "kernels" else moe.fused
    return moe


def expert(moe: MoE, number: int, x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "modules":
        return moe.experts.parts[number](x)  # type: ignore[union-attr]
    up, down, *biases = (weight[number] for weight in moe.experts.weights)
    h = up @ x + (biases[0] if biases else 0)
    gate, hidden = h.chunk(2)
    return down @ (torch.nn.functional.silu(gate) * hidden) + (biases[1] if biases else 0)


def by_definition(_: Mesh, kind: str) -> dict[str, torch.Tensor]:
    moe, x = made(kind), tokens(count=COUNT).requires_grad_()
    probs = torch.sigmoid(x @ moe.gate.weight.T)
    scores, ids = probs.topk(2)
    rows = [
        sum(expert(moe, int(ids[t, k]), scores[t, k] * x[t], kind) for k in range(2)) for t in range(COUNT)
    ]
    y = torch.stack(rows)  # type: ignore[arg-type]
    y.square().sum().backward()
    grads = gradients(moe)
    for name, parameter in moe.named_parameters():
        grads.setdefault(name, torch.zeros_like(parameter))
    return grads | {"dx": x.grad, "y": y.detach()}


def layer(mesh: Mesh, kind: str, exchange: dict[str, Any]) -> dict[str, torch.Tensor]:
    moe = made(kind, mesh, **exchange)
    x = tokens(count=COUNT).chunk(mesh.num_ranks)[mesh.rank].clone().requires_grad_()
    y = moe(x)
    y.square().sum().backward()
    return gradients(moe) | {"dx": x.grad, "y": y.detach()}


@pytest.mark.parametrize(
    ("kind", "ranks", "exchange"),
    [
        ("built-in", 1, {}),
        ("kernels", 1, {}),
        ("biased", 2, {"schedule": "smart", "chunks": 2}),
        ("modules", 2, {"shadow": (0, 3)}),
    ],
)
def test_output_and_gradients_are_those_of_the_definition(kind: str, ranks: int, exchange: Any) -> None:
    expected = run_alone(by_definition, kind)
    results = run_ranks(ranks, layer, kind, exchange)
    shared = set.intersection(*(set(result) for result in results))
    found = {name: torch.cat([r[name] for r in results]) for name in shared}
    found["gate.weight"] = torch.stack([r["gate.weight"] for r in results]).sum(0)
    if kind == "modules":
        found |= {name: value for r in results for name, value in r.items() if name.startswith("experts.")}
    assert_alike(found, expected)
