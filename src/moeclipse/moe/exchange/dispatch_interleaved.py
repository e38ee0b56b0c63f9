"""Dispatch, experts, combine as three autograd nodes, so that another microbatch runs while rows travel.

              _Launch                   _Compute                       _Collect
    forward   rows leave      switch    experts, results leave  switch   sum over ranks
    backward  d_rows arrive     <-      dgrad, R, dW under R      <-     gradients of the sum leave

The programs, and what they do to tensors, are those of the one node (`moe/exchange/dispatch_combine`), run in
slices.

Order of backward. Autograd runs what is ready, in an order of its own; ranks that took transfers in different
orders would wait for each other, and a node that waits could come before work that hides it. So a baton, an
empty tensor, goes through all nodes of all microbatches in the order in which they ran. Its gradient carries
nothing, but a node cannot run backward before those that ran behind it: backward is forward reversed, and
hides what forward hid.

Contract. One backward over all microbatches: the baton ties their graphs together. What backward needs is
kept by the last node, in the order in which the one node keeps it, so activation checkpointing may fill it in
by a forward that takes no turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.comm.async_ops.execute import Execution
from moeclipse.moe.exchange.dispatch_combine import WHOLE, BackwardRun, ForwardKept, ForwardRun, LayerCall
from moeclipse.moe.exchange.pipeline_pieces import first_compute, last_compute
from moeclipse.moe.exchange.saved_tensors import Context, put_together, take_apart, without_rows
from moeclipse.moe.own_loop.microbatch_threads import Turns
from moeclipse.moe.private_torch import keeps_graph
from moeclipse.ops.first_order import first_order


def dispatch_in_turns(
    turns: Turns,
    scores_TK: torch.Tensor,
    call: LayerCall,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> torch.Tensor:
    """What `DispatchCombine` computes."""
    if turns.baton is None:
        turns.baton = torch.zeros(0, device=scores_TK.device, requires_grad=torch.is_grad_enabled())
    rows = InTurns(call)
    token, turns.baton = _Launch.apply(turns.baton, scores_TK, rows, *inputs)
    turns.switch()
    token, turns.baton = _Compute.apply(token, turns.baton, rows, *weights)
    turns.switch()
    y_TO, turns.baton = _Collect.apply(token, turns.baton, rows)
    return y_TO


class InTurns:
    """The rows of one call while they travel; what the three nodes share."""

    def __init__(self, call: LayerCall) -> None:
        self.call, self.rank = call, call.plan.dispatcher.group.index
        self.inputs: list[torch.Tensor] = []
        self.back: BackwardRun | None = None

    def launch(self, scores_TK: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs = [without_rows(tensor) for tensor in inputs]
        self.run: ForwardRun | None = self.call.forward(scores_TK, inputs)
        self.run.start()
        self.forward = Execution(self.call.programs.forward, self.rank, self.run.op)
        self.forward.advance(first_compute(self.forward.ops))

    def compute(self) -> None:
        """All that computes, and the transfers that follow from it; the last ones are under way."""
        self.forward.advance(last_compute(self.forward.ops) + 1)
        self.forward.advance()

    def collect(self) -> tuple[torch.Tensor, ForwardKept]:
        assert self.run is not None
        self.forward.get()
        out_TO, kept = self.run.finish(), self.run.kept()
        self.run = None
        del self.forward
        return out_TO, kept

    def launch_back(self, back: BackwardRun) -> None:
        self.back = back
        back.start()
        self.backward = Execution(self.call.programs.backward, self.rank, back.op)
        self.backward.advance(first_compute(self.backward.ops))

    def compute_back(self, wanted: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
        if self.back is None:  # nobody asked for what came out: the baton alone led here
            return (None,) * len(wanted)
        self.back.wanted = wanted
        self.backward.advance()
        return self.back.weight_grads

    def collect_back(self) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        if self.back is None:
            return [None] * len(self.inputs), None
        self.backward.get()
        found = self.back.finish()
        self.back = None
        del self.backward
        return found


class InTurnsContext(Context):
    rows: InTurns


class CollectContext(InTurnsContext):
    state: ForwardKept | None
    token: torch.Tensor


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: InTurnsContext,
        baton: torch.Tensor,
        scores_TK: torch.Tensor,
        rows: InTurns,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows.launch(scores_TK, inputs)
        ctx.rows = rows
        return baton.new_zeros(1), baton.clone()

    @staticmethod
    @first_order
    def backward(ctx: InTurnsContext, _token: torch.Tensor, baton: torch.Tensor) -> tuple[object, ...]:
        d_inputs, d_scores_TK = ctx.rows.collect_back()
        return baton, d_scores_TK, None, *d_inputs


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: InTurnsContext, token: torch.Tensor, baton: torch.Tensor, rows: InTurns, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows.compute()
        ctx.rows = rows
        return token.clone(), baton.clone()

    @staticmethod
    @first_order
    def backward(ctx: InTurnsContext, token: torch.Tensor, baton: torch.Tensor) -> tuple[object, ...]:
        return token, baton, None, *ctx.rows.compute_back(ctx.needs_input_grad[3:])


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: CollectContext, token: torch.Tensor, baton: torch.Tensor, rows: InTurns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_TO, kept = rows.collect()
        ctx.state, tensors = take_apart(kept, WHOLE)
        ctx.save_for_backward(*tensors)
        ctx.rows, ctx.token = rows, token.new_zeros(1)
        return out_TO, baton.clone()

    @staticmethod
    @first_order
    def backward(ctx: CollectContext, d_out_TO: torch.Tensor, baton: torch.Tensor) -> tuple[object, ...]:
        kept = put_together(ctx.state, ctx.saved_tensors, WHOLE)
        if not keeps_graph():
            ctx.state = None
        ctx.rows.launch_back(BackwardRun(kept, d_out_TO, ctx.rows.inputs))
        return ctx.token, baton, None
