"""One number for each index; an index of -1 gives 0."""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def pick(values, index, out, N, stride, BLOCK: tl.constexpr):
    """values [5, 6], index [1, -1, 0]: out [6, 0, 5]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    where = tl.load(index + at, mask=at < N, other=-1).to(tl.int64)
    value = tl.load(values + where * stride, mask=where >= 0, other=0.0)
    tl.store(out + at, value, mask=at < N)
