"""RMSNorm, alone or behind the sum of the residual stream, in one pass over rows each way.

    rms_norm    y = x s w                       s = 1 / sqrt(mean(x^2) + eps), one for each row
    add_norm    h = a + b,  y = h s w           h is rounded first: it is the stream that goes on
    beside_norm x and y                         what else x is for comes back in the same pass

    with `shift` the factor is w + shift, for weights around zero: the reference computes that

    backward    g = dy w,   dx = s (g - x s mean(g x s)) (+ dh),   dw = sum over rows of dy x s

Contract. Over the last dimension, any number of others. Kept for backward: x (or h) and s. Sums and products
are fp32 inside a row, and the kernel rounds once; dw is added up in one order, so two runs give the same
bits, and goes to its `place` where it has one (`ops/sum_parts`). Kernels take x and w of one type, bf16, fp16
or fp32; all else is the reference.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.ops.first_order import first_order
from moeclipse.ops.precision import WIDE
from moeclipse.ops.sum_parts import Place, weight_grad_of_parts

WIDEST = 16384
"""Columns of a row that one program holds."""
PROGRAMS = 512
"""Of backward; each adds up a row of dw."""


def rms_norm_reference(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, shift: float = 0.0
) -> torch.Tensor:
    wide = x.to(WIDE[x.dtype])
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if shift:  # in the wide type: next to 1 a narrow one loses what is small in a weight
        return (wide * scale * (weight_D.to(wide.dtype) + shift)).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight_D


def add_norm_reference(
    a: torch.Tensor, b: torch.Tensor, weight_D: torch.Tensor, eps: float, shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    total = a + b
    return total, rms_norm_reference(total, weight_D, eps, shift)


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, place: Place | None = None, shift: float = 0.0
) -> torch.Tensor:
    if shift or not norm_fits(x, weight_D):
        return rms_norm_reference(x, weight_D, eps, shift)
    out: torch.Tensor = _RmsNorm.apply(x, weight_D, eps, place)
    return out


def beside_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, place: Place | None = None, shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, its norm): whoever goes on with both lets their gradients meet inside the norm's."""
    if shift or not norm_fits(x, weight_D):
        return x, rms_norm_reference(x, weight_D, eps, shift)
    x, out = _BesideNorm.apply(x, weight_D, eps, place)
    return x, out


def add_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    place: Place | None = None,
    shift: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a + b, its norm)."""
    if shift or not norm_fits(a, weight_D) or a.dtype != b.dtype or a.shape != b.shape:
        return add_norm_reference(a, b, weight_D, eps, shift)
    total, out = _AddNorm.apply(a, b, weight_D, eps, place)
    return total, out


def norm_fits(x: torch.Tensor, weight_D: torch.Tensor) -> bool:
    return (
        x.is_cuda
        and x.numel() > 0
        and x.dtype == weight_D.dtype
        and x.dtype.itemsize < 8
        and x.shape[-1] <= WIDEST
        and not torch.compiler.is_compiling()
    )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, place: Place | None
    ) -> torch.Tensor:
        _, out, scale_N = norm_kernel(x, None, weight_D, eps)
        ctx.save_for_backward(x, weight_D, scale_N)
        ctx.place = place
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        return *_gradients(ctx, d_out, None), None, None


class _BesideNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, place: Place | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, out, scale_N = norm_kernel(x, None, weight_D, eps)
        ctx.save_for_backward(x, weight_D, scale_N)
        ctx.place = place
        ctx.set_materialize_grads(False)
        return x.view_as(x), out

    @staticmethod
    @first_order
    def backward(ctx: Any, d_x: torch.Tensor | None, d_out: torch.Tensor | None) -> tuple[Any, ...]:
        if d_out is None:
            return d_x, None, None, None
        return *_gradients(ctx, d_out, d_x), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, weight_D: torch.Tensor, eps: float, place: Place | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, out, scale_N = norm_kernel(a, b, weight_D, eps)
        ctx.save_for_backward(total, weight_D, scale_N)
        ctx.place = place
        return total, out

    @staticmethod
    @first_order
    def backward(ctx: Any, d_total: torch.Tensor, d_out: torch.Tensor) -> tuple[Any, ...]:
        d_x, d_weight_D = _gradients(ctx, d_out, d_total, weight_at=2)
        return d_x, d_x, d_weight_D, None, None


def _gradients(
    ctx: Any, d_out: torch.Tensor, d_total: torch.Tensor | None, weight_at: int = 1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx, dw for autograd)."""
    x, weight_D, scale_N = ctx.saved_tensors
    d_x, parts_PD = norm_backward_kernel(d_out, d_total, x, weight_D, scale_N)
    if not ctx.needs_input_grad[weight_at]:
        return d_x, None
    return d_x, weight_grad_of_parts(parts_PD, weight_D, ctx.place)


def norm_kernel(
    x: torch.Tensor, added: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + added or x, its norm, s of each row)."""
    from moeclipse.ops.triton import norm

    x_ND = _rows(x)
    (N, D), launch = x_ND.shape, _launch(x_ND.shape[1])
    out, scale_N = x.new_empty(x.shape), x.new_empty(N, dtype=torch.float32)
    total = x if added is None else x.new_empty(x.shape)
    added_ND = x_ND if added is None else _rows(added)
    norm.rms_norm[(-(-N // launch["ROWS"]),)](
        x_ND, added_ND, weight_D, total, out, scale_N, N, D, x_ND.stride(0), added_ND.stride(0), eps,
        ADD=added is not None, **launch,
    )  # fmt: skip
    return total, out, scale_N


def norm_backward_kernel(
    d_out: torch.Tensor,
    d_total: torch.Tensor | None,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    scale_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw in parts); `d_total` is what else reaches x."""
    from moeclipse.ops.triton import norm

    x_ND, d_out_ND = _rows(x), _rows(d_out)
    (N, D), launch = x_ND.shape, _launch(x_ND.shape[1])
    d_total_ND = d_out_ND if d_total is None else _rows(d_total)
    programs = min(PROGRAMS, -(-N // launch["ROWS"]))
    d_x, parts_PD = x.new_empty(x.shape), x.new_empty(programs, D, dtype=torch.float32)
    norm.rms_norm_backward[(programs,)](
        d_out_ND, d_total_ND, x_ND, weight_D, scale_N, d_x, parts_PD, N, D,
        d_out_ND.stride(0), d_total_ND.stride(0), x_ND.stride(0), programs,
        ADD=d_total is not None, **launch,
    )  # fmt: skip
    return d_x, parts_PD


def _rows(x: torch.Tensor) -> torch.Tensor:
    """As a matrix whose rows are whole in memory; they may lie apart."""
    x_ND = x.reshape(-1, x.shape[-1])
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def _launch(width: int) -> dict[str, int]:
    columns = 1 << max(width - 1, 1).bit_length()
    rows = max(1, min(32, 2048 // columns))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": 4 if rows * columns <= 2048 else 8}
