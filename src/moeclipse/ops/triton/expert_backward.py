"""Backward of SwiGLU with scores, one pass over rows.

    g, u = h_m,  a = silu(g) u         rebuilt from the pre-activation, which is all that forward kept
    dscore_m = <dA_m, a>               neither Y nor dY is needed: <dO, a W^T> = <dO W, a>
    da = score_m dA_m                  dg = da u silu'(g),  du = da silu(g)
    scaled_m = score_m a               the operand of the weight gradient of W_down

dA is read and score x a written in the same place, so dA costs no memory of its own.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def swiglu_backward(
    d_a_scaled, h, scores, d_h, d_score, offsets, num_experts, F, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):
    """dA comes in, score x a goes out in its place.

    h is [rows, 2F]. Row m with F = 2: g = h[m, 0:2], u = h[m, 2:4]; its score gradient is summed in one
    program over all F columns.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < tl.load(offsets + num_experts)
    score = tl.load(scores + row, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for first in range(0, F, BLOCK_F):
        column = first + tl.arange(0, BLOCK_F)
        mask = inside[:, None] & (column < F)[None, :]
        at = row[:, None] * F + column[None, :]
        at_gate = row[:, None] * 2 * F + column[None, :]
        d_a = tl.load(d_a_scaled + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(h + at_gate, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(h + at_gate + F, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        a = silu * u
        total += tl.sum(d_a * a, axis=1)
        d_a *= score[:, None]
        d_g = d_a * u * (sigmoid + silu * (1.0 - sigmoid))
        dtype = d_h.dtype.element_ty
        tl.store(d_a_scaled + at, (a * score[:, None]).to(dtype), mask=mask)
        tl.store(d_h + at_gate, d_g.to(dtype), mask=mask)
        tl.store(d_h + at_gate + F, (d_a * silu).to(dtype), mask=mask)
    tl.store(d_score + row, total, mask=inside)
