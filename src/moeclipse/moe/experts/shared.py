"""The shared expert: all tokens, one expert, no exchange."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from moeclipse.moe.exchange.saved_tensors import put_together, take_apart
from moeclipse.moe.experts.shared_gate import GatedShared
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.ops.activation import activate
from moeclipse.ops.first_order import first_order
from moeclipse.ops.precision import WIDE


def shared_expert(x_TD: torch.Tensor, experts: Experts | GatedShared) -> torch.Tensor:
    """In the type of x."""
    if torch.compiler.is_compiling():
        return shared_expert_reference(x_TD, experts)
    y_TD: torch.Tensor = _Shared.apply(x_TD, experts, *experts.weights)
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


class _Shared(torch.autograd.Function):
    """Weight gradients go where those of other experts go, which autograd knows nothing of."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, experts: Experts | GatedShared, *_: torch.Tensor
    ) -> torch.Tensor:
        y_TD, saved = experts.forward(x_TD, [len(x_TD)])
        ctx.state, tensors = take_apart(saved)
        ctx.save_for_backward(*tensors)
        ctx.experts = experts
        return y_TD

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[Any, ...]:
        dx_TD, pending = ctx.experts.dgrad(dy_TD.contiguous(), put_together(ctx.state, ctx.saved_tensors))
        return dx_TD, None, *ctx.experts.wgrad([pending], wanted=ctx.needs_input_grad[2:])
