"""What stands between the two projections of an expert.

    kind      h            a
    swiglu    [gate, up]   silu(gate) * up
    geglu     [gate, up]   gelu(gate) * up         gelu with the error function, not its tanh approximation
    relu2     [up]         max(up, 0)^2
    gelu      [up]         gelu(up)

    clamped_swiglu   [gate, up]   g sigmoid(1.702 g) (u + 1)     g = min(gate, 7), u = up between -7 and 7
                                                                 (gpt-oss)

    backward   d_gate = d_a * up * f'(gate),  d_up = d_a * f(gate)       gated
               d_up   = d_a * f'(up)                                      not gated

Only h is kept for backward: the activation is cheap to rebuild and as large as everything else. `activated`
and `activate_backward` are one kernel each on CUDA; `activate` is the plain form, which autograd and
compilers know.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from moeclipse.ops.first_order import first_order

Activation = Literal["swiglu", "geglu", "relu2", "gelu", "clamped_swiglu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GATED = ("swiglu", "geglu", "clamped_swiglu")
SLOPE, LIMIT = 1.702, 7.0
"""Of clamped_swiglu."""


def hidden_width(activation: Activation, d_ff: int) -> int:
    """Columns of h: gated experts project twice."""
    return 2 * d_ff if activation in GATED else d_ff


def activate(h_NH: torch.Tensor, activation: Activation = "swiglu") -> torch.Tensor:
    if activation not in GATED:
        return F.gelu(h_NH) if activation == "gelu" else F.relu(h_NH).square()
    gate, up = h_NH.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(SLOPE * gate) * (up + 1)
    return (F.silu(gate) if activation == "swiglu" else F.gelu(gate)) * up


def activated(h_NH: torch.Tensor, activation: Activation = "swiglu") -> torch.Tensor:
    """The same as `activate`; differentiable once."""
    if not activation_fits(h_NH):
        return activate(h_NH, activation)
    a_NF: torch.Tensor = _Activate.apply(h_NH, activation)
    return a_NF


def activation_fits(h_NH: torch.Tensor) -> bool:
    return h_NH.is_cuda and h_NH.numel() > 0 and h_NH.dtype.itemsize < 8 and not torch.compiler.is_compiling()


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_NH: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(h_NH)
        ctx.activation = activation
        return activate_kernel(h_NH, activation)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_a_NF: torch.Tensor) -> tuple[torch.Tensor, None]:
        (h_NH,) = ctx.saved_tensors
        return activate_backward_kernel(d_a_NF, h_NH, ctx.activation)[0], None


def activate_kernel(h_NH: torch.Tensor, activation: Activation) -> torch.Tensor:
    from moeclipse.ops.triton import activation as kernels

    h_NH, width = h_NH.contiguous(), _width(h_NH, activation)
    a_NF = h_NH.new_empty(*h_NH.shape[:-1], width)
    grid, options = _launch(h_NH, width, activation)
    kernels.activate[grid](h_NH, a_NF, width, **options)
    return a_NF


def activate_backward_kernel(
    d_a_NF: torch.Tensor, h_NH: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    from moeclipse.ops.triton import activation as kernels

    d_a_NF, h_NH, width = d_a_NF.contiguous(), h_NH.contiguous(), _width(h_NH, activation)
    d_h_NH, a_NF = torch.empty_like(h_NH), torch.empty_like(d_a_NF)
    grid, options = _launch(h_NH, width, activation)
    kernels.activate_backward[grid](d_a_NF, h_NH, d_h_NH, a_NF, width, **options)
    return d_h_NH, a_NF


def _width(h_NH: torch.Tensor, activation: Activation) -> int:
    return h_NH.shape[-1] // 2 if activation in GATED else h_NH.shape[-1]


def _launch(h_NH: torch.Tensor, width: int, activation: Activation) -> tuple[tuple[int, int], dict[str, Any]]:
    block = min(1024, 1 << max(width - 1, 1).bit_length())
    options = {"ACT": activation, "GATED": activation in GATED, "BLOCK": block, "num_warps": 4}
    return (h_NH.shape[:-1].numel(), -(-width // block)), options


def activate_backward(
    d_a_NF: torch.Tensor, h_NH: torch.Tensor, activation: Activation = "swiglu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_h, a): the activation falls out on the way, and the weight gradient needs it."""
    picked = activate_backward_kernel if activation_fits(h_NH) else activate_backward_reference
    return picked(d_a_NF, h_NH, activation)


def activate_backward_reference(
    d_a_NF: torch.Tensor, h_NH: torch.Tensor, activation: Activation = "swiglu"
) -> tuple[torch.Tensor, torch.Tensor]:
    if activation not in GATED:
        value, slope = value_and_slope(h_NH, activation)
        return d_a_NF * slope, value
    gate, up = h_NH.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        return _clamped_backward(d_a_NF, gate, up)
    value, slope = value_and_slope(gate, activation)
    d_h = torch.empty_like(h_NH)
    d_gate, d_up = d_h.chunk(2, dim=-1)
    torch.mul(d_a_NF, up * slope, out=d_gate)
    torch.mul(d_a_NF, value, out=d_up)
    return d_h, value * up


def _clamped_backward(
    d_a_NF: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What lies beyond the limits gets no gradient."""
    g, u = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
    sigmoid = torch.sigmoid(SLOPE * g)
    value = g * sigmoid
    d_gate = d_a_NF * u * (sigmoid + SLOPE * value * (1 - sigmoid)) * (gate <= LIMIT)
    d_up = d_a_NF * value * (up.abs() <= LIMIT)
    return torch.cat([d_gate, d_up], dim=-1), value * u


def value_and_slope(x: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """f and its derivative, elementwise: silu, gelu or the squared positive part."""
    if activation == "swiglu":
        sigmoid = torch.sigmoid(x)
        silu = x * sigmoid
        return silu, sigmoid + silu * (1 - sigmoid)
    if activation == "relu2":
        positive = F.relu(x)
        return positive.square(), 2 * positive
    share = 0.5 * (1 + torch.erf(x * 0.5**0.5))
    return x * share, share + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
