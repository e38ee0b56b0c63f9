"""Calls that repeat earlier ones are known by torch's generator, and lent losses get their gradients back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apart import apart
from moeclipse.moe import losses as module
from moeclipse.moe.losses import Calls, defer_loss, replay_loss


class InBackward(torch.autograd.Function):
    """Runs a function inside backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return grad, None


def inside(function: Any) -> None:
    InBackward.apply(torch.zeros(1, requires_grad=True), function).sum().backward()


@apart
def test_a_forward_inside_backward_repeats_the_call_that_drew_its_number() -> None:
    calls, states, found = Calls(), [], []
    for _ in range(3):
        states.append(torch.get_rng_state())
        found.append(calls.begin())
    assert [(call.step, again) for call, again in found] == [(0, False), (1, False), (2, False)]
    for number in (1, 0, 2, 1):
        torch.set_rng_state(states[number])
        inside(lambda: found.append(calls.begin()))
        call, again = found.pop()
        assert again
        assert call is found[number][0]
    torch.manual_seed(99)  # a checkpoint that restores nothing
    inside(lambda: found.append(calls.begin()))
    assert found.pop()[0] is found[2][0]
    torch.set_rng_state(states[1])
    assert calls.begin()[0].step == 3, "outside of backward a seed that comes again is a new call"


@apart
def test_few_calls_are_remembered() -> None:
    calls = Calls()
    for _ in range(module.REMEMBERED + 5):
        calls.begin()
    assert len(calls._known) == module.REMEMBERED


@apart
def test_a_lent_loss_is_repaid() -> None:
    calls = Calls()
    call, _ = calls.begin()
    weight = torch.tensor(3.0, requires_grad=True)
    with torch.no_grad():
        deferred = defer_loss(weight.square(), call)
    assert deferred.requires_grad
    (2 * deferred).backward()
    y = replay_loss(torch.ones(2, requires_grad=True), weight.square(), call)
    y.sum().backward()
    assert weight.grad == 12.0


@apart
def test_a_loss_whose_gradient_comes_too_late_says_so() -> None:
    calls, state = Calls(), torch.get_rng_state()
    call, _ = calls.begin()
    with torch.no_grad():
        deferred = defer_loss(torch.ones(()), call)
    torch.set_rng_state(state)
    inside(calls.begin)
    with pytest.raises(RuntimeError, match=r"add aux_loss\(model\) to the loss and call backward once"):
        deferred.backward()
