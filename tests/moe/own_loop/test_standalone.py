"""MoE layers in a user's own loop: under DDP all gradients are those of the mean of the ranks' losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.standalone import aux_loss, exclude_experts, sync_gradients
from moeclipse.ops.random import fill_normal
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

D, TOKENS = 8, 6
GATE = GateConfig(kind="sigmoid", top_k=2, bias_rate=0.01, balance_loss=0.5)


class Net(nn.Module):
    """What a user has: layers of their own around ours."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.moe = MoE(D, 10, 6, gate=GATE, mesh=mesh, init_std=0.4, dtype=torch.float64)
        self.last = nn.Linear(D, 1, dtype=torch.float64)
        for number, parameter in enumerate([*self.first.parameters(), *self.last.parameters()]):
            fill_normal(parameter.data, 100 + number, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(self.first(x)))


def data(ranks: int) -> torch.Tensor:
    return fill_normal(torch.empty(ranks, 2, TOKENS // 2, D, dtype=torch.float64), 5, 1.0)


def alone(mesh: Mesh, ranks: int, steps: int) -> dict[str, torch.Tensor]:
    """The same losses in one process: a mean over equal parts is a mean over all."""
    model = Net(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(data(ranks).flatten(0, 1)).square().mean() + aux_loss(model)).backward()
        sync_gradients(model)
        optimizer.step()
    return {name: p.grad for name, p in model.named_parameters()} | {"bias": model.moe.gate.bias_E}


def under_ddp(mesh: Mesh, steps: int) -> dict[str, torch.Tensor]:
    model = Net(mesh)
    ddp = DistributedDataParallel(exclude_experts(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ddp(data(mesh.num_ranks)[mesh.rank]).square().mean() + aux_loss(ddp)
        loss.backward()
        sync_gradients(ddp)
        optimizer.step()
    return {name: p.grad for name, p in model.named_parameters()} | {"bias": model.moe.gate.bias_E}


@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_three_steps_under_ddp_equal_one_process(dp: int, ep: int) -> None:
    expected = run_alone(alone, dp * ep, 3)
    results = run_ranks(dp * ep, under_ddp, 3, dp=dp)
    for rank, result in enumerate(results):
        for name, value in result.items():
            reference = expected[name]
            if ".experts." in name:
                first = sum(len(results[e][name]) for e in range(rank % ep))
                reference = reference[first : first + len(value)]
            assert difference(value, reference) <= 1e-12, (rank, name)


def forgotten(mesh: Mesh) -> list[str]:
    ddp = DistributedDataParallel(Net(mesh))
    found = []
    for call in (lambda: ddp(data(2)[mesh.rank]), lambda: sync_gradients(ddp)):
        try:
            call()
        except ConfigError as error:
            found.append(str(error))
    return found


def test_ddp_that_would_mix_experts_is_refused_in_forward_and_before_the_step() -> None:
    for texts in run_ranks(2, forgotten):
        assert len(texts) == 2
        assert all("DDP(moeclipse.exclude_experts(model))" in text for text in texts)


def test_a_loss_before_any_forward_is_refused() -> None:
    with pytest.raises(ConfigError, match="has run forward"):
        aux_loss(Net(None))


def test_any_leading_dimensions() -> None:
    moe = MoE(8, 16, 4, top_k=2)
    x = torch.randn(3, 5, 2, 8)
    y = moe(x)
    assert y.shape == x.shape
    assert torch.equal(moe(x.flatten(0, 2)), y.flatten(0, 2))
