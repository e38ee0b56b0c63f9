"""What a loop forgot or did twice with experts' gradients is said; what it may do is left alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.guards import is_finished
from moeclipse.ops.random import fill_normal
from moeclipse.testing.run_ranks import run_ranks

D = 6


class Expert(nn.Module):
    def __init__(self, expert: int) -> None:
        super().__init__()
        self.net = nn.Linear(D, D, dtype=torch.float64)
        fill_normal(self.net.weight.data, expert, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.net(x))


def made(mesh: Mesh, kind: str) -> tuple[MoE, torch.optim.Optimizer]:
    own = {"experts": Expert} if kind == "modules" else {}
    moe = MoE(D, 4, 4, mesh=mesh, init_std=0.5, dtype=torch.float64, **own)
    return moe, torch.optim.SGD(moe.parameters(), lr=0.1)


def backward(moe: MoE, mesh: Mesh, number: int = 0) -> None:
    x = fill_normal(torch.empty(5, D, dtype=torch.float64), 10 * number + mesh.rank, 1.0)
    (moe(x).square().mean() + moeclipse.aux_loss(moe)).backward()


def text_of(call: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            call()
        except ConfigError as error:
            return str(error)
    return "; ".join(str(each.message) for each in warned if each.category is UserWarning) or "no error"


def grads(moe: MoE) -> list[torch.Tensor]:
    return [p.grad.clone() for p in moe.experts.parameters()]


def by_hand(moe: MoE, way: str) -> None:
    with torch.no_grad():
        for parameter in moe.parameters():
            if parameter.grad is not None:
                if way == "scaled":
                    parameter.grad = parameter.grad / 2
                grad = parameter.grad
                if way == "taken":
                    parameter.grad = None
                parameter.sub_(0.1 * grad)
                if way in ("none", "scaled"):
                    parameter.grad = None


def wrong(mesh: Mesh, kind: str) -> dict[str, str]:
    """What each mistake is told."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    told = {}
    moe, optimizer = made(mesh, kind)
    backward(moe, mesh)
    told["step"] = text_of(optimizer.step)
    for way in ("kept", "none", "taken", "scaled"):
        moe, optimizer = made(mesh, kind)
        backward(moe, mesh)
        by_hand(moe, way)
        told[f"forward, {way}"] = text_of(lambda moe=moe: backward(moe, mesh))
    moe, optimizer = made(mesh, kind)
    backward(moe, mesh)
    told["clip raw"] = text_of(lambda: nn.utils.clip_grad_norm_(moe.parameters(), 0.1))
    moeclipse.sync_gradients(moe)
    told["clip"] = text_of(lambda: nn.utils.clip_grad_norm_(moe.parameters(), 0.1))
    nn.utils.clip_grad_norm_(moe.parameters(), math.inf)  # measures for a log, and scales nothing
    backward(moe, mesh, 1)
    told["more"] = text_of(lambda: moeclipse.sync_gradients(moe))
    moe, _ = made(mesh, kind)
    optimizer = ZeroRedundancyOptimizer(moe.parameters(), torch.optim.SGD, lr=0.1)
    backward(moe, mesh)
    moeclipse.sync_gradients(moe)
    before = [p.detach().clone() for p in moe.parameters()]
    told["zero"] = text_of(optimizer.step)
    assert all(map(torch.equal, before, moe.parameters()))
    return told


SAID = {
    "step": "optimizer.step() was called with gradients of experts that sync_gradients has not finished",
    "forward, kept": "weights were changed with gradients of experts that sync_gradients has not finished",
    "forward, none": "weights were changed after a backward with gradients of experts that sync_gradients",
    "forward, taken": "weights were changed after a backward with gradients of experts that sync_gradients",
    "forward, scaled": "weights were changed after a backward with gradients of experts that sync_gradients",
    "clip raw": "use moeclipse.clip_grad_norm_(model, max_norm)",
    "clip": "use moeclipse.clip_grad_norm_(model, max_norm)",
    "more": "to which backward has added since",
    "zero": "ZeroRedundancyOptimizer would give all ranks the experts of one",
}


@pytest.mark.parametrize("kind", ["built-in", "modules"])
def test_what_was_forgotten_or_done_twice_is_said(kind: str) -> None:
    for told in run_ranks(2, wrong, kind):
        assert told.keys() == SAID.keys()
        for name, text in told.items():
            assert SAID[name] in text, (name, text)


def right(mesh: Mesh, kind: str) -> None:
    """Loops that are right, in all their forms."""
    moe, optimizer = made(mesh, kind)
    backward(moe, mesh)
    moeclipse.sync_gradients(moe)
    once = grads(moe)
    moeclipse.clip_grad_norm_(moe, 1e9)
    moeclipse.sync_gradients(moe)
    assert all(map(torch.equal, once, grads(moe)))  # a second call divides nothing
    optimizer.step()
    for to_none in (True, False, True):  # both kinds of zeros, and accumulation over two forwards
        optimizer.zero_grad(set_to_none=to_none)
        backward(moe, mesh, 1)
        backward(moe, mesh, 2)
        moeclipse.sync_gradients(moe)
        optimizer.step()
    optimizer.zero_grad()
    backward(moe, mesh)  # thrown away, and other weights loaded
    optimizer.zero_grad()
    moe.load_state_dict(moe.state_dict())
    backward(moe, mesh)
    optimizer.zero_grad()
    backward(moe, mesh)  # thrown away, then weights changed by somebody else
    optimizer.zero_grad()
    x = torch.ones(2, D, dtype=torch.float64)
    moe(x)
    with torch.no_grad():
        moe.experts.get_parameter(next(iter(moe.experts.named_parameters()))[0]).mul_(0.5)
    loss = moe(x).sum()  # gradients that go nowhere
    torch.autograd.grad(loss, list(moe.experts.parameters()), allow_unused=True)
    assert not any(is_finished(p.grad) for p in moe.parameters())
    with torch.no_grad():
        moe.experts.get_parameter(next(iter(moe.experts.named_parameters()))[0]).mul_(0.5)
    moe(x)
    nn.utils.clip_grad_norm_(moe.gate.parameters(), 1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        backward(moe, mesh)
        moeclipse.sync_gradients(moe)
        return torch.zeros(())

    backward(moe, mesh)
    optimizer.step(closure)
    optimizer.step(closure)


def quiet(mesh: Mesh, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        right(mesh, kind)


@pytest.mark.parametrize("kind", ["built-in", "modules"])
def test_loops_that_are_right_hear_nothing(kind: str) -> None:
    run_ranks(2, quiet, kind)


def one_rank_of_each(mesh: Mesh) -> None:
    """All experts on all ranks: torch's own norm is right after `sync_gradients`, and refused before."""
    moe, optimizer = made(mesh, "built-in")
    backward(moe, mesh)
    with pytest.raises(ConfigError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(moe.experts.parameters(), 0.1)
    moeclipse.sync_gradients(moe)
    nn.utils.clip_grad_norm_(moe.experts.parameters(), 0.1)
    optimizer.step()


def test_ranks_with_all_experts_may_clip_as_torch_does() -> None:
    run_ranks(2, one_rank_of_each, dp=2)
