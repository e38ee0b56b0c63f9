"""What a user has: a small model of their own around our layer, its tokens, and gradients to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.module_experts import joint
from moeclipse.moe.layer import MoE
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.compare import difference

D, FF, EXPERTS, TOKENS = 8, 6, 6, 7

GATES = {
    "softmax": GateConfig(top_k=2, balance_loss=0.5),
    "gap": GateConfig(top_k=3, choose="gap", balance_loss=0.5),
    "gshard": GateConfig(kind="gshard", top_k=2, balance_loss=0.5),
    "noisy": GateConfig(kind="noisy", top_k=2, balance_loss=0.5),
}


class Expert(nn.Module):
    """A user's expert."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(D, D, dtype=torch.float64) for _ in range(2))
        for name, parameter in self.named_parameters():
            fill_normal(parameter.data, key_of("expert", expert, name), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class JointExperts(nn.Module):
    """All of a rank's in one module."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self.each = nn.ModuleList(map(Expert, ids))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return torch.cat([net(part) for net, part in zip(self.each, x.split(counts), strict=True)])


KINDS: dict[str, dict[str, Any]] = {
    "built-in": {},
    "biased": {"expert_bias": True},
    "kernels": {},
    "modules": {"experts": Expert},
    "joint": {"experts": joint(JointExperts)},
}
"""Experts of every kind; "kernels" runs the references of the kernels."""


def layer(
    kind: str = "built-in", gate: str | GateConfig = "softmax", mesh: Mesh | None = None, **more: Any
) -> MoE:
    config = GATES[gate] if isinstance(gate, str) else gate
    options: dict[str, Any] = {"init_std": 0.5, "dtype": torch.float64, **KINDS[kind], **more}
    made = MoE(D, FF, EXPERTS, gate=config, mesh=mesh, **options)
    if kind == "kernels":
        made.fused = True
    if config.kind == "noisy":
        fill_normal(made.gate.noise_weight.data, 3, 0.5)
    return made


class Net(nn.Module):
    """Layers of the user's around ours; `run` is how the inner part is called."""

    def __init__(self, moe: MoE, run: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.moe = moe
        self.last = nn.Linear(D, 2, dtype=torch.float64)
        self.run = run
        for number, parameter in enumerate([*self.first.parameters(), *self.last.parameters()]):
            fill_normal(parameter.data, 100 + number, 0.5)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.moe(torch.tanh(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(x) if self.run is None else self.run(self.block, x))


def often(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """The cases, of which all but the chosen ones run in the full set of tests only."""
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[] if case in chosen else [pytest.mark.full]))
    return marked


def tokens(number: int = 0, rank: int = 0, count: int = TOKENS) -> torch.Tensor:
    return fill_normal(torch.empty(count, D, dtype=torch.float64), key_of("tokens", number, rank), 1.0)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + moeclipse.aux_loss(model)


def assert_alike(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 1e-12
) -> None:
    assert found.keys() == expected.keys()
    bad = {name: difference(found[name], expected[name]) for name in expected}
    assert all(value <= bound for value in bad.values()), bad
