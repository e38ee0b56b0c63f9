"""RMSNorm over rows, with the residual sum in front of it, and its gradient.

A program holds ROWS whole rows, so a row is read once and its mean needs no second pass. In backward each
program goes over every so-manieth block of rows and keeps its sum of dw; the sums are added afterwards, in
order.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, added, weight, total, out, scales, N, D, stride, added_stride, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """weight [1, 1], row [3, 4], eps 0: scale 1 / sqrt(12.5), out [0.85, 1.13]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < N)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(added + row[:, None] * added_stride + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        # What goes on is rounded, and the norm is that of what goes on.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / D + eps)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < N)


@triton.jit
def rms_norm_backward(
    d_out, d_total, x, weight, scales, d_x, d_weight, N, D,
    d_out_stride, d_total_stride, stride, programs,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of all rows; program p leaves its part of dw in d_weight[p]."""
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < N)[:, None] & (column < D)[None, :]
        scale = tl.load(scales + row, mask=row < N, other=0.0)
        value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(d_out + row[:, None] * d_out_stride + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        unit = value * scale[:, None]
        g = dy * w[None, :]
        mean = tl.sum(g * unit, axis=1) / D
        d_value = scale[:, None] * (g - unit * mean[:, None])
        if ADD:
            d_value += tl.load(
                d_total + row[:, None] * d_total_stride + column[None, :], mask=mask, other=0.0
            ).to(tl.float32)
        tl.store(d_x + row[:, None] * D + column[None, :], d_value.to(d_x.dtype.element_ty), mask=mask)
        sums += tl.sum(dy * unit, axis=0)
    tl.store(d_weight + program * D + column, sums, mask=column < D)
