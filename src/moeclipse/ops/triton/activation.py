"""Activations of plain rows, without scores: a = f(g) u, and its gradient, in one pass each."""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from moeclipse.ops.triton.activations import gated_slopes, gated_value, value_and_slope, value_of


@triton.jit
def activate(h, a, F, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """h is [rows, 2F], gate before up, or [rows, F] when not GATED. swiglu of [0, 5]: 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    H = 2 * F if GATED else F
    g = tl.load(h + row * H + column, mask=column < F, other=0.0).to(tl.float32)
    if GATED:
        u = tl.load(h + row * H + F + column, mask=column < F, other=0.0).to(tl.float32)
        value = gated_value(g, u, ACT)
    else:
        value = value_of(g, ACT)
    tl.store(a + row * F + column, value.to(a.dtype.element_ty), mask=column < F)


@triton.jit
def activate_backward(d_a, h, d_h, a, F, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """dg = da u f'(g), du = da f(g); a is rebuilt on the way."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < F
    H = 2 * F if GATED else F
    dtype = d_h.dtype.element_ty
    d = tl.load(d_a + row * F + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(h + row * H + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        u = tl.load(h + row * H + F + column, mask=mask, other=0.0).to(tl.float32)
        value, slope, to_u = gated_slopes(g, u, ACT)
        tl.store(d_h + row * H + F + column, (d * to_u).to(dtype), mask=mask)
    else:
        value, slope = value_and_slope(g, ACT)
    tl.store(d_h + row * H + column, (d * slope).to(dtype), mask=mask)
    tl.store(a + row * F + column, value.to(dtype), mask=mask)
