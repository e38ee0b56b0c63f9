"""What keeps the load even and the logits small, and what a layer tells of it.

Both losses are means over all tokens of the microbatch on all ranks. Each rank computes its share of them:
the shares sum to the loss of the one-process model, and so do their gradients.

    balance   E * sum_e f_e * p_e      f_e = rows of expert e / all rows (no gradient)
                                       p_e = mean probability of expert e
    z         mean_t logsumexp(logits_t)^2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeclipse.moe.config import GateConfig
from moeclipse.moe.gate.routing import Routing
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
