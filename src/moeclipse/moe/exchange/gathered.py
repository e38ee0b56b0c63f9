"""Tokens of all ranks on every rank: each computes the pairs of its own experts, and sums go back.

    forward    gather tokens, choices     experts on all P x T tokens, but for others' pairs     sum back
    backward   gather d_out               dgrad, wgrad                               sum d_x, d_scores back

Idea. How much travels does not depend on what the gate chose, so nobody has to be told: no sizes, no
host, and on GPUs one graph (`train/step/graphs`). What arrives at a rank is a microbatch of P x T tokens of
which it holds some experts: the same kernels compute it that compute a layer on one rank. A token's vector
goes to ranks that want nothing of it, which costs little where tokens visit as many experts as there are
ranks: with 8 choices among 8 ranks two thirds of all (token, rank) meet, among 4 ranks nine tenths.

Contract. Gradients are those of the other exchanges. Ranks may have different numbers of tokens: all are
filled up to the largest, with tokens that choose nobody. Rows kept for backward have room for every pair of
all ranks: P times what an even load needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import pad

from moeclipse.comm.reduce.token_gather import TokenGather
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.exchange.saved_tensors import Context
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.private_torch import NO_BACKWARD, running_backward
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.first_order import first_order
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Kind

TOKENS, CHOICES, OUTPUTS = "gather of tokens", "gather of choices", "sum of outputs"
D_OUTPUTS, D_TOKENS, D_SCORES = (
    "gather of output gradients",
    "sum of token gradients",
    "sum of score gradients",
)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def launches(num_inputs: int, where: str) -> dict[Kind, list[str]]:
    """What one call launches, by the op of its layer that does, as a ledger asks."""
    there, back = [TOKENS] * num_inputs + [CHOICES], [D_TOKENS] * num_inputs + [D_SCORES]
    said = {
        kinds.DISPATCH_F: there,
        kinds.COMBINE_F: [OUTPUTS],
        kinds.DISPATCH_R: [*there, OUTPUTS],
        kinds.COMBINE_B: [D_OUTPUTS],
        kinds.DISPATCH_B: back,
    }
    return {kind: [f"{what}, {where}" for what in whats] for kind, whats in said.items()}


def own_experts(ids_TK: torch.Tensor, dispatcher: Dispatcher) -> torch.Tensor:
    """Where among this rank's experts each choice is, -1 if it is another rank's or nobody's.

    From tables on the device, which stay where they are when experts move: a graph goes on reading them.
    """
    rank = dispatcher.group.index
    first, num = dispatcher.slot_bounds[rank], len(dispatcher.placement.slots[rank])
    place_TK = dispatcher.slot_of_E[ids_TK.clamp(min=0)] - first
    mine = (ids_TK >= 0) & (place_TK >= 0) & (place_TK < num)
    return torch.where(mine, place_TK, -1)


def visit_gathered(
    visit: Callable[[Routing, tuple[torch.Tensor, ...]], torch.Tensor],
    routing: Routing,
    inputs: tuple[torch.Tensor, ...],
    wire: TokenGather,
    dispatcher: Dispatcher,
    tokens: Tokens,
    where: str,
) -> torch.Tensor:
    """This rank's tokens, visited by experts of all ranks; `visit` is what the experts of one rank do."""
    if running_backward() == NO_BACKWARD:
        wire.lane.recorder.announce(where, launches(len(inputs), where))
    num = len(inputs[0])
    there, everyone = gather_tokens(
        wire, routing, inputs, dispatcher, tokens.most(num, dispatcher.group), where
    )
    y_TO: torch.Tensor = _SumBack.apply(wire, where, visit(there, everyone))
    return y_TO[:num] if len(y_TO) != num else y_TO


def gather_tokens(
    wire: TokenGather,
    routing: Routing,
    inputs: tuple[torch.Tensor, ...],
    dispatcher: Dispatcher,
    most: int,
    where: str,
) -> tuple[Routing, tuple[torch.Tensor, ...]]:
    """Routing and inputs of all ranks' tokens, `most` of each rank, as this rank's experts see them."""
    missing = most - len(routing.expert_ids_TK)
    scores_TK, ids_TK = routing.scores_TK, routing.expert_ids_TK
    if missing:
        scores_TK = pad(scores_TK, (0, 0, 0, missing))
        ids_TK = pad(ids_TK, (0, 0, 0, missing), value=-1)
        inputs = tuple(pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in inputs)
    scores, ids, *everyone = _Gather.apply(wire, where, ids_TK, scores_TK, *inputs)
    there = replace(routing, scores_TK=scores, expert_ids_TK=own_experts(ids, dispatcher), sending=None)
    return there, tuple(everyone)


Like = tuple[torch.Size, torch.dtype, torch.device]


class WireContext(Context):
    wire: TokenGather
    where: str
    like: list[Like]
    """Of what all ranks gave."""


class _Gather(torch.autograd.Function):
    """Called with (wire, where, ids, scores, inputs...): theirs of all ranks, scores and ids first."""

    @staticmethod
    def forward(
        ctx: WireContext,
        wire: TokenGather,
        where: str,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.wire, ctx.where = wire, where
        ctx.set_materialize_grads(False)
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (scores_TK, *inputs)]
        everyone = [wire.gather(x, f"{TOKENS}, {where}") for x in inputs]
        # One message for both: ids as bits beside those of the scores.
        as_bits = BITS[scores_TK.itemsize]
        both = torch.cat([scores_TK.contiguous().view(as_bits), ids_TK.to(as_bits)], 1)
        scores, ids = wire.gather(both, f"{CHOICES}, {where}").chunk(2, 1)
        ids = ids.to(torch.int64)
        ctx.mark_non_differentiable(ids)
        return scores.contiguous().view(scores_TK.dtype), ids, *everyone

    @staticmethod
    @first_order
    def backward(
        ctx: WireContext, d_scores: torch.Tensor | None, _: object, *d_inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        wire, where = ctx.wire, ctx.where

        def back(grad: torch.Tensor | None, what: str, like: Like) -> torch.Tensor:
            shape, dtype, device = like
            if grad is None:  # all ranks call alike, whoever has something to say
                grad = torch.zeros((wire.group.size * shape[0], *shape[1:]), dtype=dtype, device=device)
            return wire.sum_back(grad, f"{what}, {where}")

        first, *rest = ctx.like
        found = [back(grad, D_TOKENS, like) for grad, like in zip(d_inputs, rest, strict=True)]
        return None, None, None, back(d_scores, D_SCORES, first), *found


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: WireContext, wire: TokenGather, where: str, partial: torch.Tensor) -> torch.Tensor:
        ctx.wire, ctx.where = wire, where
        return wire.sum_back(partial, f"{OUTPUTS}, {where}")

    @staticmethod
    @first_order
    def backward(ctx: WireContext, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, ctx.wire.gather(d_y, f"{D_OUTPUTS}, {ctx.where}")
