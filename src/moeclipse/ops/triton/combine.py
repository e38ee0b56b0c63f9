"""Sum each token's rows, wherever they lie: out_t = sum over k of weight * rows[place_tk].

A gather, not a scatter: every output row is written once by one program, which adds in the order of k in
fp32 and rounds once. No atomics, so two runs give the same bits. A place of -1 adds nothing.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def add_row(total, rows, place, weight, stride, column, D, WEIGHTED: tl.constexpr):
    """total + weight[row] rows[row] for the row that stands at `place`; -1 changes nothing."""
    row = tl.load(place).to(tl.int64)
    width = tl.where(row >= 0, D, 0)
    value = tl.load(rows + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    if WEIGHTED:
        value *= tl.load(weight + row, mask=row >= 0, other=0.0).to(tl.float32)
    return total + value


@triton.jit
def gather_sum(
    rows, place, weight, out, stride, D, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """place = [[4, -1, 0]]: out_0 = weight[4] rows[4] + weight[0] rows[0]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if K <= 16:
        # Unrolled, all rows are on their way at once.
        for k in tl.static_range(K):
            total = add_row(total, rows, place + token * K + k, weight, stride, column, D, WEIGHTED)
    else:
        for k in range(K):
            total = add_row(total, rows, place + token * K + k, weight, stride, column, D, WEIGHTED)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=column < D)
