"""Sum the rows of each expert: out_e (+)= sum over its rows of weight_m rows[index_m].

One program sums BLOCK columns of one expert over all its rows, in order: no atomics, equal bits in two runs.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def sum_groups(
    rows, index, weight, out, offsets, stride, D,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """offsets = [0, 2, 2]: out_0 = rows[0] + rows[1]; out_1 is zero, or is left as it was when ADD."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK_M, BLOCK), dtype=tl.float32)
    for first in range(begin, end, BLOCK_M):
        place = first + tl.arange(0, BLOCK_M)
        inside = place < end
        row = place
        if GATHER:
            row = tl.load(index + place, mask=inside, other=0)
        at = rows + row.to(tl.int64)[:, None] * stride + column[None, :]
        value = tl.load(at, mask=inside[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += value
    result = tl.sum(total, axis=0)
    at = out + expert.to(tl.int64) * D + column
    if ADD:
        result += tl.load(at, mask=column < D, other=0.0).to(tl.float32)
    tl.store(at, result.to(out.dtype.element_ty), mask=column < D)
