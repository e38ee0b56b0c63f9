"""The routed part of a MoE layer: one autograd node that runs two verified programs.

    forward    S rows out     C experts              R partial sums back    then one sum over ranks
    backward   S d_out rows   C dgrad   W weights    R d_x rows back        then one sum over ranks

Rows of borrowed experts (`moe/shadow`) take no part in this: they are computed where they are.

The node runs on every rank, also with zero rows: a path that cut autograd on one rank would leave the
others waiting in the backward exchange. Which unit of rows travels when is the program's business
(`schedule/smart`); what an op does to the tensors is written here, and a blocking exchange is the program
with one unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from moeclipse.comm.exchange import Result
from moeclipse.comm.execute import execute
from moeclipse.moe.dispatch import Plan, Unit, return_score_grads, send_pairs, unpack_pairs
from moeclipse.moe.shadow import Shadowed
from moeclipse.ops.combine import sum_rows
from moeclipse.schedule.check import Verified
from moeclipse.schedule.op import Op


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What a layer runs; both are verified and share one shape."""

    forward: Verified
    backward: Verified


@dataclass(kw_only=True)
class Forward:
    """Tensors of one forward pass while its program runs, and what backward needs of them."""

    plan: Plan
    experts: Any
    rows_ND: torch.Tensor
    scores_TK: torch.Tensor
    shadowed: Shadowed | None = None
    saved: dict[tuple[int, int], Any] = field(default_factory=dict)
    y: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def run(self, verified: Verified) -> torch.Tensor:
        plan = self.plan
        pairs = send_pairs(plan, self.scores_TK)
        self.arrived_RD = self.rows_ND.new_empty(plan.num_arriving, self.rows_ND.shape[1])
        self.back_NO = self.rows_ND.new_empty(len(self.rows_ND), self.experts.out_width)
        self.pairs = pairs
        self.row_M: torch.Tensor | None = None
        execute(verified, plan.route.group.index, self.op)
        out_TO = plan.sum_tokens(self.back_NO)
        return out_TO if self.shadowed is None else out_TO + self.kept_TO

    def op(self, op: Op) -> Result | None:
        if self.shadowed is not None and op.kind == "SHADOW_SEND":
            return self.shadowed.send_weights()
        if self.shadowed is not None and op.kind == "SHADOW_F":
            self.kept_TO = self.shadowed.forward()
            return None
        key = (op.step or 0, op.chunk or 0)
        unit = self.plan.units[key]
        if op.kind == "S_F":
            return self.plan.send(unit, self.rows_ND, self.arrived_RD, f"dispatch {op}")
        if op.kind == "R_F":
            return self.plan.send_back(unit, self.partial_RO, self.back_NO, f"combine {op}")
        assert op.kind == "C_F", f"no such op in forward: {op}"
        self.compute(key, unit)
        return None

    def compute(self, key: tuple[int, int], unit: Unit) -> None:
        if self.row_M is None:
            self.row_M, self.score_M = unpack_pairs(self.plan, self.pairs.get())
        row_M, score_M = self.row_M[unit.pairs], self.score_M[unit.pairs]
        y_MO, self.saved[key] = self.experts.forward(self.arrived_RD[row_M], unit.counts)
        first, num_rows = unit.arriving.start, sum(unit.receive_rows)
        self.partial_RO = sum_rows(y_MO, row_M - first, num_rows, score_M)
        self.y[key] = y_MO


class Backward:
    """Tensors of one backward pass while its program runs."""

    def __init__(self, done: Forward, d_out_TO: torch.Tensor) -> None:
        self.done, self.plan, self.experts = done, done.plan, done.experts
        self.d_out_TO = d_out_TO
        self.d_rows_NO = d_out_TO[self.plan.row_token_N]
        self.pending: list[Any] = []

    def run(self, verified: Verified) -> tuple[torch.Tensor, torch.Tensor]:
        """(d_x_TD, d_scores_TK); weight gradients are in `weight_grads`."""
        plan, done = self.plan, self.done
        self.arrived_RO = self.d_rows_NO.new_empty(plan.num_arriving, self.d_rows_NO.shape[1])
        self.back_ND = torch.empty_like(done.rows_ND)
        self.d_score_M = torch.empty_like(done.score_M)
        execute(verified, plan.route.group.index, self.op)
        d_scores_TK = torch.zeros_like(done.scores_TK)
        d_scores_TK.view(-1)[plan.pair_place_n] = self.d_scores.get()
        d_x_TD, shadowed = plan.sum_tokens(self.back_ND), done.shadowed
        if shadowed is not None:
            d_x_TD = d_x_TD + shadowed.d_x_TD
            d_scores_TK.view(-1)[shadowed.place_m] = shadowed.d_score_m
        return d_x_TD, d_scores_TK

    def op(self, op: Op) -> Result | None:
        if op.kind.startswith("SHADOW"):
            return self.shadow_op(op.kind)
        if op.kind == "C_W":
            self.d_scores = return_score_grads(self.plan, self.d_score_M)
            self.weight_grads = self.experts.wgrad(self.pending)
            return None
        key = (op.step or 0, op.chunk or 0)
        unit = self.plan.units[key]
        if op.kind == "S_B":
            return self.plan.send(unit, self.d_rows_NO, self.arrived_RO, f"backward dispatch {op}")
        if op.kind == "R_B":
            return self.plan.send_back(unit, self.partial_RD, self.back_ND, f"backward combine {op}")
        assert op.kind == "C_B", f"no such op in backward: {op}"
        self.compute(key, unit)
        return None

    def shadow_op(self, kind: str) -> Result | None:
        shadowed = self.done.shadowed
        assert shadowed is not None
        if kind == "SHADOW_B":
            shadowed.dgrad(self.d_out_TO)
        elif kind == "SHADOW_W":
            shadowed.wgrad()
        elif kind == "SHADOW_REDUCE":
            return shadowed.return_grads()
        else:
            shadowed.add_grads(self.weight_grads)
        return None

    def compute(self, key: tuple[int, int], unit: Unit) -> None:
        done = self.done
        assert done.row_M is not None
        row_M, score_M = done.row_M[unit.pairs], done.score_M[unit.pairs]
        y_MO = done.y.pop(key)
        d_pair_MO = self.arrived_RO[row_M]
        wide = score_M.dtype
        self.d_score_M[unit.pairs] = (d_pair_MO.to(wide) * y_MO.to(wide)).sum(-1)
        d_y_MO = (d_pair_MO * score_M[:, None]).to(y_MO.dtype)
        dx_MD, pending = self.experts.dgrad(d_y_MO, done.saved.pop(key))
        self.pending.append(pending)
        self.partial_RD = sum_rows(dx_MD, row_M - unit.arriving.start, sum(unit.receive_rows))


class Routed(torch.autograd.Function):
    """Gradients: d_x, d_scores, and the experts' weights by hand."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        plan: Plan,
        experts: Any,
        programs: Programs,
        shadowed: Shadowed | None,
        *_: nn.Parameter,
    ) -> torch.Tensor:
        rows_ND = x_TD[plan.row_token_N]
        if shadowed is not None:
            shadowed.bind(x_TD, scores_TK)
        run = Forward(plan=plan, experts=experts, rows_ND=rows_ND, scores_TK=scores_TK, shadowed=shadowed)
        out_TO = run.run(programs.forward)
        ctx.run, ctx.programs = run, programs
        return out_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TO: torch.Tensor) -> tuple[Any, ...]:
        back = Backward(ctx.run, d_out_TO)
        d_x_TD, d_scores_TK = back.run(ctx.programs.backward)
        ctx.run = None
        return d_x_TD, d_scores_TK, None, None, None, None, *back.weight_grads
