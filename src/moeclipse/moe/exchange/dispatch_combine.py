"""Dispatch, experts, combine: one autograd node that runs two verified programs.

    forward    S rows out     C experts              R partial sums back    then one sum over ranks
    backward   S d_out rows   C dgrad   W weights    R d_x rows back        then one sum over ranks

Rows of shadowed experts (`moe/experts/shadow`) take no part in this: they are computed where they are. Those
that serve other ranks (`moe/experts/served`) are slots like all others while the call lasts.

The node runs on every rank, also with zero rows: a path that cut autograd on one rank would leave the
others waiting in backward. Which unit travels when is the program's business (`schedule/smart`); what an op
does to the tensors is written here. A token may be several tensors (`moe/tokens`), which travel together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from moeclipse.comm.async_ops.execute import execute
from moeclipse.comm.async_ops.lane import InFlight, Joined
from moeclipse.moe.exchange.dispatch import Dispatcher, DispatchPlan, Unit
from moeclipse.moe.exchange.launches import announce
from moeclipse.moe.exchange.saved_tensors import Context, put_together, take_apart
from moeclipse.moe.experts.fused import FusedExperts
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.protocols import PairExperts
from moeclipse.moe.experts.served import Guests, ServedGrads, ServedKept
from moeclipse.moe.experts.shadow import RankShadows, ShadowExperts, ShadowGrads, ShadowKept
from moeclipse.moe.private_torch import keeps_graph
from moeclipse.moe.tune.stopwatch import Stopwatch
from moeclipse.ops.first_order import first_order
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.schedule.kinds import Kind
from moeclipse.schedule.op import Op

Key = tuple[int, int]
"""(step, chunk) of a unit."""
TEXT_OF = cache(Op.__str__)
"""The few ops of an exchange name its transfers, in every call of every layer."""


def key_of(op: Op) -> Key:
    return (op.step or 0, op.chunk or 0)


def send_unit(
    plan: DispatchPlan, unit: Unit, rows: torch.Tensor, out: torch.Tensor, what: str
) -> InFlight[torch.Tensor] | None:
    """Rows of one unit to the ranks of its step; `rows` and `out` hold those of all units."""
    if unit.local:
        out[unit.arriving].copy_(rows[unit.leaving])
        return None
    counts, label = (unit.send_rows, unit.receive_rows), f"{what}, {plan.where}"
    return plan.dispatcher.transport.all_to_all(rows[unit.leaving], *counts, label, out[unit.arriving])


def return_unit(
    plan: DispatchPlan, unit: Unit, rows: torch.Tensor, out: torch.Tensor, what: str
) -> InFlight[torch.Tensor] | None:
    """Results for the rows of one unit to where they came from; `rows` are those of this unit alone."""
    if unit.local:
        out[unit.leaving].copy_(rows)
        return None
    counts, label = (unit.receive_rows, unit.send_rows), f"{what}, {plan.where}"
    return plan.dispatcher.transport.all_to_all(rows, *counts, label, out[unit.leaving])


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What a layer runs; all are verified and share one shape."""

    forward: Verified
    backward: Verified
    pieces: Verified
    """Backward for pipelines, which place weight gradients themselves: all of them come last."""


@dataclass(frozen=True, kw_only=True)
class ForwardKept:
    """What backward needs of a forward pass."""

    plan: DispatchPlan
    experts: PairExperts
    saved: dict[Key, Any]
    """By unit; backward takes them out."""
    scores: tuple[torch.Size, torch.dtype]
    shadows: ShadowKept | ServedKept | None


WHOLE = (Dispatcher, Unit, RankShadows, PairwiseExperts)
"""What stands in a ForwardKept and outlives it, or has no tensors."""


@dataclass(kw_only=True)
class ForwardRun:
    """Tensors of one forward pass while its program runs."""

    plan: DispatchPlan
    experts: PairExperts
    inputs: Sequence[torch.Tensor]
    scores_TK: torch.Tensor
    out_width: int
    shadows: ShadowExperts | Guests | None = None
    saved: dict[Key, Any] = field(default_factory=dict)

    def run(self, verified: Verified) -> torch.Tensor:
        self.start()
        execute(verified, self.plan.dispatcher.group.index, self.op)
        return self.finish()

    def start(self) -> None:
        plan = self.plan
        self.take_rows(self.inputs)
        self.inputs = ()
        self.back_NO = self.rows[0].new_empty(len(self.rows[0]), self.out_width)
        self.pairs = plan.send_pairs_of(self.scores_TK)

    def take_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        """`rows`: of each input, those this rank sends, in the order of units; room for those that arrive."""
        # Booleans travel as bytes: not every wire knows them.
        numbers = [tensor.byte() if tensor.dtype == torch.bool else tensor for tensor in inputs]
        room = [(self.plan.num_arriving, *tensor.shape[1:]) for tensor in numbers]
        self.rows = [self.plan.take_rows(tensor) for tensor in numbers]
        self.arrived = list(map(torch.Tensor.new_empty, self.rows, room))

    def kept(self) -> ForwardKept:
        """What backward needs, after `finish`."""
        return ForwardKept(
            plan=self.plan,
            experts=self.experts,
            saved=self.saved,
            scores=(self.scores_TK.shape, self.scores_TK.dtype),
            shadows=None if self.shadows is None else self.shadows.kept,
        )

    def finish(self, keep_rows: bool = False) -> torch.Tensor:
        """The layer's output; everything has come back. `keep_rows`: they will be computed once more."""
        out_TO = self.plan.sum_tokens(self.back_NO)
        if isinstance(self.shadows, ShadowExperts):
            out_TO = out_TO + self.kept_TO
            del self.kept_TO
        self.rows, self.back_NO = [], out_TO.new_empty(0, self.out_width)
        self.partial_RO = self.back_NO  # that of the last unit has left
        self.arrived = self.arrived if keep_rows else []  # what backward needs of them is in `saved`
        return out_TO

    def op(self, op: Op) -> InFlight[object] | None:
        return FORWARD[op.kind](self, op)

    def send(self, op: Op) -> InFlight[object] | None:
        unit, label = self.plan.units[key_of(op)], f"dispatch {TEXT_OF(op)}"
        pairs = zip(self.rows, self.arrived, strict=True)
        sent = [send_unit(self.plan, unit, rows, out, label) for rows, out in pairs]
        return sent[0] if len(sent) == 1 else Joined(sent)

    def send_back(self, op: Op) -> InFlight[object] | None:
        unit, label = self.plan.units[key_of(op)], f"combine {TEXT_OF(op)}"
        return return_unit(self.plan, unit, self.partial_RO, self.back_NO, label)

    def send_shadows(self, _: Op) -> InFlight[object]:
        assert self.shadows is not None
        return self.shadows.send_weights()

    def compute_shadows(self, _: Op) -> None:
        assert isinstance(self.shadows, ShadowExperts)
        self.kept_TO = self.shadows.forward()

    def compute(self, op: Op) -> None:
        recorder = self.plan.dispatcher.lane.recorder
        with nullcontext() if recorder.marks is None else recorder.mark(op):
            key = key_of(op)
            self.partial_RO, self.saved[key] = self.experts.forward(*self.operands(key))

    def recompute(self, op: Op) -> None:
        """What backward needs of a unit, once more."""
        recorder = self.plan.dispatcher.lane.recorder
        with nullcontext() if recorder.marks is None else recorder.mark(op):
            key = key_of(op)
            self.saved[key] = self.experts.recompute(*self.operands(key))

    def operands(self, key: Key) -> tuple[Any, ...]:
        """What experts take of a unit; kernels also its grouping."""
        unit = self.plan.units[key]
        rows = [tensor[unit.arriving] for tensor in self.arrived]
        index_M, score_M = self.pairs.of(unit)
        more = (self.pairs.grouping(unit),) if isinstance(self.experts, FusedExperts) else ()
        return (rows, index_M, unit.counts, score_M, *more)


FORWARD: Mapping[Kind, Callable[[ForwardRun, Op], InFlight[object] | None]] = {
    kinds.S_F: ForwardRun.send,
    kinds.C_F: ForwardRun.compute,
    kinds.R_F: ForwardRun.send_back,
    kinds.SHADOW_SEND: ForwardRun.send_shadows,
    kinds.SHADOW_F: ForwardRun.compute_shadows,
}


class BackwardRun:
    """Tensors of one backward pass while its program runs."""

    def __init__(
        self,
        kept: ForwardKept,
        d_out_TO: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool] | None = None,
    ) -> None:
        """`inputs` are like those of forward, and may be empty; `wanted`: see `Trainable.wgrad`."""
        self.kept, self.plan, self.experts, self.wanted = kept, kept.plan, kept.experts, wanted
        self.shadows = ShadowGrads(kept.shadows) if isinstance(kept.shadows, ShadowKept) else None
        self.guests = (
            ServedGrads(kept.shadows, kept.experts) if isinstance(kept.shadows, ServedKept) else None
        )
        self.d_out_TO = d_out_TO
        self.d_scores: InFlight[torch.Tensor] | None = None
        self.d_rows_NO = self.plan.take_rows(d_out_TO)
        self.pending: list[tuple[int, Any]] = []
        """Weight gradients to come, each with its step."""
        self.weight_grads: tuple[torch.Tensor | None, ...] = ()
        num_rows = len(self.plan.row_token_N)
        self.back = [
            tensor.new_empty((num_rows, *tensor.shape[1:])) if tensor.is_floating_point() else None
            for tensor in inputs
        ]

    def run(self, verified: Verified) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """(gradients of the inputs, d_scores_TK); those of the weights are in `weight_grads`."""
        self.start()
        execute(verified, self.plan.dispatcher.group.index, self.op)
        return self.finish()

    def start(self) -> None:
        self.arrived_RO = self.d_rows_NO.new_empty(self.plan.num_arriving, self.d_rows_NO.shape[1])
        num_pairs = sum(self.plan.receive_pairs)
        self.d_score_M = self.d_rows_NO.new_empty(num_pairs, dtype=self.kept.scores[1])

    def return_scores(self) -> None:
        """Score gradients travel once all units have them; behind the rows, because they are small."""
        if self.d_scores is None:
            self.d_scores = self.plan.return_score_grads(self.d_score_M)

    def wgrad(self, step: int | None = None) -> None:
        """Of one step's rows, or of all that are left."""
        now = [pending for of, pending in self.pending if step in (None, of)]
        self.pending = [later for later in self.pending if step not in (None, later[0])]
        if self.guests is not None:
            self.guests.collect(now, self.d_out_TO)
        self.weight_grads = self.experts.wgrad(now, self.weight_grads, self.wanted)

    def finish(self) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        plan, shadows = self.plan, self.shadows
        assert self.d_scores is not None
        d_scores_TK = plan.place_score_grads(self.d_scores.get(), self.kept.scores[0])
        grads = [None if rows is None else plan.sum_tokens(rows) for rows in self.back]
        if shadows is not None:
            d_scores_TK.view(-1)[shadows.place_m] = shadows.d_score_m
            for number, more in enumerate(shadows.d_inputs):
                mine = grads[number]
                grads[number] = mine if mine is None or more is None else mine + more
        return grads, d_scores_TK

    def op(self, op: Op) -> InFlight[object] | None:
        return BACKWARD[op.kind](self, op)

    def send(self, op: Op) -> InFlight[object] | None:
        unit = self.plan.units[key_of(op)]
        return send_unit(self.plan, unit, self.d_rows_NO, self.arrived_RO, f"backward dispatch {TEXT_OF(op)}")

    def send_back(self, op: Op) -> InFlight[object] | None:
        given, label = (self.plan, self.plan.units[key_of(op)]), f"backward combine {TEXT_OF(op)}"
        pairs = zip(self.partial, self.back, strict=True)
        wanted = [(rows, out) for rows, out in pairs if rows is not None and out is not None]
        sent = [return_unit(*given, rows, out, label) for rows, out in wanted]
        return sent[0] if len(sent) == 1 else Joined(sent)

    def compute_weights(self, op: Op) -> None:
        if op.step is None and self.guests is None:  # the last ones: every unit has its score gradients
            self.return_scores()
        self.wgrad(op.step)

    def compute_shadows(self, op: Op) -> None:
        if self.guests is not None:
            self.guests.add_grads(self.weight_grads)
            return
        assert self.shadows is not None
        if op.kind is kinds.SHADOW_B:
            self.shadows.dgrad(self.d_out_TO)
        elif op.kind is kinds.SHADOW_W:
            self.shadows.wgrad()
        else:
            self.shadows.add_grads(self.weight_grads)

    def return_shadows(self, _: Op) -> InFlight[object]:
        if self.guests is not None:
            returned = self.guests.return_grads()
            self.return_scores()  # always the last to leave
            return returned
        assert self.shadows is not None
        return self.shadows.return_grads()

    def compute(self, op: Op) -> None:
        recorder = self.plan.dispatcher.lane.recorder
        with nullcontext() if recorder.marks is None else recorder.mark(op):
            self.compute_unit(key_of(op))

    def compute_unit(self, key: Key) -> None:
        unit = self.plan.units[key]
        saved = self.kept.saved.pop(key)
        self.partial, d_score_M, pending = self.experts.dgrad(self.arrived_RO[unit.arriving], saved)
        if len(self.plan.units) == 1 and d_score_M.dtype == self.d_score_M.dtype:
            self.d_score_M = d_score_M
        else:
            self.d_score_M[unit.pairs] = d_score_M.to(self.d_score_M.dtype)
        self.pending.append((key[0], pending))


BACKWARD: Mapping[Kind, Callable[[BackwardRun, Op], InFlight[object] | None]] = {
    kinds.S_B: BackwardRun.send,
    kinds.C_B: BackwardRun.compute,
    kinds.C_W: BackwardRun.compute_weights,
    kinds.R_B: BackwardRun.send_back,
    kinds.SHADOW_B: BackwardRun.compute_shadows,
    kinds.SHADOW_W: BackwardRun.compute_shadows,
    kinds.SHADOW_REDUCE: BackwardRun.return_shadows,
    kinds.SHADOW_ADD: BackwardRun.compute_shadows,
}


class DispatchCombineContext(Context):
    program: Verified
    """Of backward."""
    watch: Stopwatch | None
    inputs: list[torch.Tensor]
    """Without their rows."""
    state: ForwardKept | None


class DispatchCombine(torch.autograd.Function):
    """Gradients: d_scores, those of the inputs, and the experts' weights by hand.

    Rows, weights and tables are kept by torch (`moe/exchange/saved_tensors`), so the node is as good as any
    of torch's own. Called with (scores, call, inputs..., weights...): `call` says what runs and how many
    inputs there are.
    """

    @staticmethod
    def forward(
        ctx: DispatchCombineContext, scores_TK: torch.Tensor, call: LayerCall, *tensors: torch.Tensor
    ) -> torch.Tensor:
        inputs = tensors[: call.num_inputs]
        run = call.forward(scores_TK, inputs)
        programs, ledger = call.programs, call.plan.dispatcher.lane.recorder.ledger
        if ledger is not None:
            announce(ledger, call.plan, programs.forward, programs.backward, call.num_inputs, pieces=False)
        began = call.watch.stamp() if call.watch is not None else None
        out_TO = run.run(call.programs.forward)
        if call.watch is not None:
            call.watch.lap(began, "F")
        ctx.program, ctx.watch = call.programs.backward, call.watch
        # Their types and widths; slices would keep the rows.
        ctx.inputs = [tensor.detach().new_empty(0, *tensor.shape[1:]) for tensor in inputs]
        ctx.state, kept = take_apart(run.kept(), WHOLE)
        ctx.save_for_backward(*kept)
        return out_TO

    @staticmethod
    @first_order
    def backward(ctx: DispatchCombineContext, d_out_TO: torch.Tensor) -> tuple[object, ...]:
        began = ctx.watch.stamp() if ctx.watch is not None else None
        kept = put_together(ctx.state, ctx.saved_tensors, WHOLE)
        wanted = ctx.needs_input_grad[2 + len(ctx.inputs) :]
        back = BackwardRun(kept, d_out_TO, ctx.inputs, wanted)
        d_inputs, d_scores_TK = back.run(ctx.program)
        if not keeps_graph():
            ctx.state = None
        if ctx.watch is not None:
            ctx.watch.lap(began, "B")
        return d_scores_TK, None, *d_inputs, *back.weight_grads


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """What one call of the node needs besides tensors that carry gradients."""

    plan: DispatchPlan
    programs: Programs
    experts: PairExperts
    out_width: int
    shadows: ShadowExperts | Guests | None = None
    num_inputs: int = 1
    watch: Stopwatch | None = None

    def forward(self, scores_TK: torch.Tensor, inputs: Sequence[torch.Tensor]) -> ForwardRun:
        """The state of one forward pass, before anything travels."""
        if self.shadows is not None:
            self.shadows.bind(inputs, scores_TK)
        return ForwardRun(
            plan=self.plan,
            experts=self.experts,
            inputs=inputs,
            scores_TK=scores_TK,
            out_width=self.out_width,
            shadows=self.shadows,
        )
