"""Backward of the activation with scores, one pass over rows.

    g, u = h_m,  a = f(g) u            rebuilt from the pre-activation, which is all that forward kept
    dscore_m = <dA_m, a>               neither Y nor dY is needed: <dO, a W^T> = <dO W, a>
    da = score_m dA_m                  dg = da u f'(g),  du = da f(g)
    scaled_m = score_m a               the operand of the weight gradient of W_down

Without a gate h_m = u, a = f(u), du = da f'(u). dA is read and score x a written in the same place, so dA
costs no memory of its own.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from moeclipse.ops.triton.activations import gated_slopes, value_and_slope


@triton.jit
def activation_backward(
    d_a_scaled, h, scores, d_h, d_score, offsets, num_experts, F,
    ACT: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """dA comes in, score x a goes out in its place.

    h is [rows, 2F], or [rows, F] when not GATED. Row m with F = 2: g = h[m, 0:2], u = h[m, 2:4]; its score
    gradient is summed in one program over all F columns.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < tl.load(offsets + num_experts)
    score = tl.load(scores + row, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    H = 2 * F if GATED else F
    dtype = d_h.dtype.element_ty
    for first in range(0, F, BLOCK_F):
        column = first + tl.arange(0, BLOCK_F)
        mask = inside[:, None] & (column < F)[None, :]
        at = row[:, None] * F + column[None, :]
        at_gate = row[:, None] * H + column[None, :]
        d_a = tl.load(d_a_scaled + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(h + at_gate, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            u = tl.load(h + at_gate + F, mask=mask, other=0.0).to(tl.float32)
            a, slope, to_u = gated_slopes(g, u, ACT)
        else:
            a, slope = value_and_slope(g, ACT)
        total += tl.sum(d_a * a, axis=1)
        d_a *= score[:, None]
        tl.store(d_a_scaled + at, (a * score[:, None]).to(dtype), mask=mask)
        tl.store(d_h + at_gate, (d_a * slope).to(dtype), mask=mask)
        if GATED:
            tl.store(d_h + at_gate + F, (d_a * to_u).to(dtype), mask=mask)
    tl.store(d_score + row, total, mask=inside)
