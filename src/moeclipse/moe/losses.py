"""What keeps the load even and the logits small, and what a layer tells of it.

Both losses are means over all tokens of the microbatch on all ranks. Each rank computes its share of them:
the shares sum to the loss of the one-process model, and so do their gradients.

    balance   E * sum_e f_e * p_e      f_e = rows of expert e / all rows (no gradient)
                                       p_e = mean probability of expert e
    z         mean_t logsumexp(logits_t)^2

Calls that repeat an earlier one.

Activation checkpointing throws away what a forward kept, and runs it once more inside backward. The second
run must choose the same experts, cut its rows in the same way and exchange them as the first did, or
gradients belong to another forward and ranks wait for each other; and it must not be counted.

Which earlier call is repeated? Between the two runs torch restores its global generator, and nothing else of
ours. So every call in training draws one number from it, as a dropout would: a forward inside backward that
draws the number of an earlier call repeats that call. Where checkpointing was told not to restore it
(`preserve_rng_state=False`), the last call is taken.

Reentrant checkpointing runs the first forward without a graph, so the losses of the gate have none.
`defer_loss` gives such a loss a node of its own, which keeps the gradient that reaches it; the repeated
forward hands it on (`replay_loss`). The node was made inside the checkpointed region, so autograd runs it
before the region's backward.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from moeclipse.moe.config import GateConfig
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.private_torch import NO_BACKWARD, running_backward
from moeclipse.ops.first_order import first_order
from moeclipse.ops.gate_losses import gate_losses

MOST_CALLS = 64
"""Calls of a layer in one forward whose losses are summed."""


@dataclass(frozen=True, kw_only=True)
class MoEReport:
    """What a layer tells about one microbatch."""

    aux_loss: torch.Tensor
    """This rank's share: over all ranks the shares sum to the loss."""
    load_E: torch.Tensor
    """Tokens of this rank that wanted each expert."""
    num_dropped: torch.Tensor


class UnreadLosses:
    """Losses of a layer's calls that belong to one forward of a model, whatever calls it how often.

    A forward is over once somebody asks for its losses, or once its backward has begun: the next call is one
    of another. Without a graph there is nothing to sum, so only the last counts; but activation checkpointing
    may run a whole forward without one, and its losses have a graph all the same.
    """

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self._over = self._graph = False

    def add(self, loss: torch.Tensor, y: torch.Tensor) -> None:
        """Of a call, whose output is `y`."""
        if self._over or not loss.requires_grad or y.requires_grad != self._graph:
            self.losses, self._over, self._graph = [], False, y.requires_grad
        self.losses = [*self.losses[1 - MOST_CALLS :], loss]
        if y.requires_grad:
            y.register_hook(self._end)

    def _end(self, _: torch.Tensor) -> None:
        self._over = True

    def read(self, last: torch.Tensor) -> torch.Tensor:
        """Their sum; `last`: the loss of the last call, which may be one that was not added."""
        self._over = True
        return torch.stack(self.losses).sum() if self.losses and self.losses[-1] is last else last


def report_on(
    routing: Routing,
    global_load_E: torch.Tensor,
    total_tokens: int,
    config: GateConfig,
    tp: tuple[int, int] = (0, 1),
) -> MoEReport:
    """`tp` = (index, number) of the ranks that saw the same tokens: losses are shared, one of them counts."""
    if routing.complete:
        # The number of rows needs no sum.
        rows = max(total_tokens * routing.expert_ids_TK.shape[1], 1)
        even = routing.load_E.numel() / (rows * max(total_tokens, 1))
        given = (global_load_E, routing.probabilities, routing.squares)
        aux = gate_losses(*given, config.balance_loss * even, config.z_loss / max(total_tokens, 1))
    else:
        aux = config.balance_loss * balance_loss(routing, global_load_E, total_tokens)
        if config.z_loss:
            aux = aux + config.z_loss * z_loss(routing, total_tokens)
    index, number = tp
    counts = int(index == 0)
    return MoEReport(
        aux_loss=aux / number if number > 1 else aux,
        load_E=routing.load_E * counts if number > 1 else routing.load_E,
        num_dropped=routing.num_dropped * counts if number > 1 else routing.num_dropped,
    )


def balance_loss(routing: Routing, global_load_E: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """This rank's share; 1 (over all ranks) when load and probabilities are even."""
    prob_E = routing.probabilities
    share_E = global_load_E.to(prob_E.dtype) / global_load_E.sum().clamp(min=1)
    return len(prob_E) * (share_E * prob_E).sum() / max(total_tokens, 1)


def z_loss(routing: Routing, total_tokens: int) -> torch.Tensor:
    """This rank's share."""
    return routing.squares / max(total_tokens, 1)


REMEMBERED = 1024
"""Calls between a forward and its repetition, at most."""


@dataclass(kw_only=True)
class Call:
    """One forward of a layer in training."""

    step: int
    """Keys the random numbers of the gate."""
    decided: Any = None
    """How the exchange was cut (`moe/tune/exchange_policy`)."""
    deferred: bool = False
    d_loss: torch.Tensor | None = None
    """The gradient of the gate's losses, where its forward had no graph."""
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


def defer_loss(loss: torch.Tensor, call: Call) -> torch.Tensor:
    """The loss of a forward without a graph, able to take a gradient."""
    call.deferred = True
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True, device=loss.device, dtype=loss.dtype)
        deferred: torch.Tensor = _DeferredGrad.apply(anchor, loss, call)
        return deferred


def replay_loss(y: torch.Tensor, loss: torch.Tensor, call: Call) -> torch.Tensor:
    """y; its backward also gives `loss` the gradient that reached the deferred one."""
    replayed: torch.Tensor = _ReplayedGrad.apply(y, loss, call)
    return replayed


class CallContext(FunctionCtx):
    call: Call


class _DeferredGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: CallContext, anchor: torch.Tensor, loss: torch.Tensor, call: Call) -> torch.Tensor:  # noqa: ARG004
        ctx.call = call
        return loss.clone()

    @staticmethod
    @first_order
    def backward(ctx: CallContext, d_loss: torch.Tensor) -> tuple[None, None, None]:
        if ctx.call.repeated:
            raise RuntimeError(
                "the gate's losses got their gradient after the checkpointed layer had run backward; add "
                "aux_loss(model) to the loss and call backward once, or checkpoint with use_reentrant=False"
            )
        ctx.call.d_loss = d_loss if ctx.call.d_loss is None else ctx.call.d_loss + d_loss
        return None, None, None


class _ReplayedGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: CallContext, y: torch.Tensor, loss: torch.Tensor, call: Call) -> torch.Tensor:  # noqa: ARG004
        ctx.call = call
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx: CallContext, d_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        return d_y, ctx.call.d_loss, None
