"""The shared expert: all tokens, one expert, no exchange.

A shared expert behind a gate of its own (Qwen2): each token has a gate weight for it.

    forward    y = g e(x),   g = sigmoid(x w^T)           e: the shared expert, `moe/experts/two_projections`
    dgrad      dx = e.dgrad(g dy) + d_logit w,   d_logit = g (1 - g) sum(dy e(x))
    wgrad      dw += d_logit^T x,  and those of e

The gate computes in fp32 (fp64 for fp64 models). Where the expert's width is shared out over ranks, e(x) is
part of a sum, and so is the gradient of w.

Inside `torch.compile` both kinds of experts are one graph without a break (`visit_traced`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.moe.config import ExpertsConfig
from moeclipse.moe.exchange.saved_tensors import Context, put_together, take_apart
from moeclipse.moe.experts.fused import visit_all
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.tokens import rows_for
from moeclipse.ops.activation import activate
from moeclipse.ops.first_order import first_order
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.tensor.weight_grad import Grad, Grads, WeightGrads, accumulator


def shared_expert(x_TD: torch.Tensor, experts: Experts | GatedShared, output: bool = True) -> torch.Tensor:
    """In the type of x. Without `output` nobody reads it: zeros."""
    if torch.compiler.is_compiling():
        return shared_expert_reference(x_TD, experts)
    y_TD: torch.Tensor = _Shared.apply(x_TD, experts, output, *experts.weights)
    return y_TD


def shared_expert_reference(x_TD: torch.Tensor, experts: Experts | GatedShared) -> torch.Tensor:
    """By operations that autograd, and a compiler, know."""
    if isinstance(experts, GatedShared):
        wide = WIDE[x_TD.dtype]
        share_T1 = torch.sigmoid(F.linear(x_TD.to(wide), experts.gate.to(wide)))
        return (share_T1 * shared_expert_reference(x_TD, experts.experts)).to(x_TD.dtype)
    up, down, *biases = (weight[0].to(x_TD.dtype) for weight in experts.weights)
    h = x_TD @ up.t() if not biases else x_TD @ up.t() + biases[0]
    y = activate(h, experts.activation) @ down.t()
    return y if not biases else y + biases[1]


class SharedContext(Context):
    experts: Any
    """Experts or GatedShared; `state` is what these keep."""
    state: Any


class _Shared(torch.autograd.Function):
    """Weight gradients go where those of other experts go, which autograd knows nothing of."""

    @staticmethod
    def forward(
        ctx: SharedContext, x_TD: torch.Tensor, experts: Experts | GatedShared, output: bool, *_: torch.Tensor
    ) -> torch.Tensor:
        if output:
            y_TD, saved = experts.forward(x_TD, [len(x_TD)])
        else:
            y_TD, saved = torch.zeros_like(x_TD), experts.recompute(x_TD, [len(x_TD)])
        ctx.state, tensors = take_apart(saved)
        ctx.save_for_backward(*tensors)
        ctx.experts = experts
        return y_TD

    @staticmethod
    @first_order
    def backward(ctx: SharedContext, dy_TD: torch.Tensor) -> tuple[object, ...]:
        dx_TD, pending = ctx.experts.dgrad(dy_TD.contiguous(), put_together(ctx.state, ctx.saved_tensors))
        return dx_TD, None, None, *ctx.experts.wgrad([pending], wanted=ctx.needs_input_grad[3:])


@dataclass(frozen=True, kw_only=True)
class GatedSaved:
    x: torch.Tensor
    y: torch.Tensor
    """Of the expert, before the gate."""
    g: torch.Tensor
    weight: torch.Tensor
    experts: Any


@dataclass(frozen=True, kw_only=True)
class GatedPending:
    x: torch.Tensor
    d_logit: torch.Tensor
    experts: Any


class GatedShared(nn.Module):
    """One expert for all tokens, in the three calls of `Experts`."""

    def __init__(self, experts: Experts, init: WeightInit) -> None:
        super().__init__()
        self.experts, self.key, self.init_std = (
            experts,
            key_of(init.seed, init.layer, "shared gate"),
            init.std,
        )
        self.gate = nn.Parameter(init.empty(1, experts.out_width))
        fill_normal(self.gate.data, self.key, self.init_std)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As at the start."""
        self.experts.reset_parameters()
        fill_normal(self.gate.data, self.key, self.init_std)

    @property
    def wgrads(self) -> WeightGrads:
        return self.experts.wgrads

    @wgrads.setter
    def wgrads(self, wgrads: WeightGrads) -> None:
        self.experts.wgrads = wgrads

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return (*self.experts.weights, self.gate)

    @property
    def like(self) -> torch.Tensor:
        return self.experts.like

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, GatedSaved]:
        y, inner = self.experts.forward(x, counts)
        wide = WIDE[x.dtype]
        g = torch.sigmoid(F.linear(x.to(wide), self.gate.to(wide)))
        return (y * g).to(x.dtype), GatedSaved(x=x, y=y, g=g, weight=self.gate, experts=inner)

    def recompute(self, x: torch.Tensor, counts: Sequence[int]) -> GatedSaved:
        """The whole of forward: the gate has its gradient from y."""
        return self.forward(x, counts)[1]

    def dgrad(self, dy: torch.Tensor, saved: GatedSaved) -> tuple[torch.Tensor, GatedPending]:
        g, wide = saved.g, saved.g.dtype
        dx, inner = self.experts.dgrad((dy * g).to(dy.dtype), saved.experts)
        d_g = (dy.to(wide) * saved.y.to(wide)).sum(-1, keepdim=True)
        d_logit = d_g * g * (1 - g)
        dx = dx + (d_logit * saved.weight.to(wide)).to(dx.dtype)
        return dx, GatedPending(x=saved.x, d_logit=d_logit, experts=inner)

    def wgrad(
        self, pending: Sequence[GatedPending], begun: Grads = (), wanted: Sequence[bool] | None = None
    ) -> Grads:
        inner = len(self.experts.weights)
        given = () if wanted is None else (wanted[:inner],)
        grads = self.experts.wgrad([part.experts for part in pending], begun[:inner], *given)
        if not (self.gate.requires_grad if wanted is None else wanted[inner]):
            return (*grads, None)
        return (*grads, *self.wgrads.submit([self.gate], lambda: [self._gate_grad(pending, *begun[inner:])]))

    def _gate_grad(self, pending: Sequence[GatedPending], begun: Grad = None) -> Grad:
        into, grad = accumulator(self.gate, begun)
        for part in pending:
            into += (part.d_logit.t() @ part.x.to(part.d_logit.dtype)).to(into.dtype)
        return grad


def shared_of(
    config: ExpertsConfig, build: Callable[..., Experts], init: WeightInit
) -> Experts | GatedShared | None:
    """The shared expert of a layer, behind a gate or not; None where there is none."""
    if not config.num_shared_experts:
        return None
    experts = build([-1], d_ff=config.shared_width)
    return GatedShared(experts, init) if config.shared_gate else experts


def visit_traced(
    x_TD: torch.Tensor, routing: Routing, experts: Experts, shared: Experts | GatedShared | None
) -> torch.Tensor:
    rows_TD = rows_for(x_TD, experts.like)
    y_TD = visit_all(experts, rows_TD, routing.scores_TK, routing.expert_ids_TK, sums=False)
    return y_TD if shared is None else y_TD + shared_expert(rows_TD, shared)
