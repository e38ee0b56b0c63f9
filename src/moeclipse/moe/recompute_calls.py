"""Calls of a layer, and calls that repeat an earlier one.

Activation checkpointing throws away what a forward kept, and runs it once more inside backward. The second
run must choose the same experts, cut its rows in the same way and exchange them as the first did, or
gradients belong to another forward and ranks wait for each other; and it must not be counted.

Which earlier call is repeated? Between the two runs torch restores its global generator, and nothing else of
ours. So every call in training draws one number from it, as a dropout would: a forward inside backward that
draws the number of an earlier call repeats that call. Where checkpointing was told not to restore it
(`preserve_rng_state=False`), the last call is taken.

Reentrant checkpointing runs the first forward without a graph, so the losses of the gate have none. `lend`
gives such a loss a node of its own, which keeps the gradient that reaches it; the repeated forward hands it
on (`repay`). The node was made inside the checkpointed region, so autograd runs it before the region's
backward.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from moeclipse.moe.private_torch import NO_BACKWARD, running_backward
from moeclipse.ops.first_order import first_order

REMEMBERED = 1024
"""Calls between a forward and its repetition, at most."""


@dataclass(kw_only=True)
class Call:
    """One forward of a layer in training."""

    step: int
    """Keys the random numbers of the gate."""
    decided: Any = None
    """How the exchange was cut (`moe/tune/exchange_policy`)."""
    lent: bool = False
    d_loss: torch.Tensor | None = None
    """The gradient of the gate's losses, where they were lent."""
    repeated: bool = False


class Calls:
    """The calls of one layer."""

    def __init__(self) -> None:
        self.count = 0
        self._known: OrderedDict[int, Call] = OrderedDict()

    def begin(self) -> tuple[Call, bool]:
        """(the call, whether it repeats an earlier one)."""
        drawn = int(torch.randint(2**62, ()))
        if running_backward() != NO_BACKWARD and self._known:
            call = self._known.get(drawn) or next(reversed(self._known.values()))
            call.repeated = True
            return call, True
        call = Call(step=self.count)
        self.count += 1
        self._known[drawn] = call
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return call, False


def lend(loss: torch.Tensor, call: Call) -> torch.Tensor:
    """The loss of a forward without a graph, able to take a gradient."""
    call.lent = True
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True, device=loss.device, dtype=loss.dtype)
        lent: torch.Tensor = _Lent.apply(anchor, loss, call)
        return lent


def repay(y: torch.Tensor, loss: torch.Tensor, call: Call) -> torch.Tensor:
    """y; its backward also gives `loss` the gradient that reached the lent one."""
    repaid: torch.Tensor = _Repaid.apply(y, loss, call)
    return repaid


class _Lent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, call: Call) -> torch.Tensor:  # noqa: ARG004
        ctx.call = call
        return loss.clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[None, None, None]:
        if ctx.call.repeated:
            raise RuntimeError(
                "the gate's losses got their gradient after the checkpointed layer had run backward; add "
                "aux_loss(model) to the loss and call backward once, or checkpoint with use_reentrant=False"
            )
        ctx.call.d_loss = d_loss if ctx.call.d_loss is None else ctx.call.d_loss + d_loss
        return None, None, None


class _Repaid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, loss: torch.Tensor, call: Call) -> torch.Tensor:  # noqa: ARG004
        ctx.call = call
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        return d_y, ctx.call.d_loss, None
