"""Sums of a few columns over all parts: a program goes down its columns, so the order is always the same."""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def sum_parts(parts, into, P, N, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """parts [[1, 2], [3, 4]]: into [4, 6], or what it held and [4, 6]."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < P)[:, None] & (column < N)[None, :]
        total += tl.sum(tl.load(parts + row[:, None] * N + column[None, :], mask=mask, other=0.0), axis=0)
    if ADD:
        total += tl.load(into + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(into + column, total.to(into.dtype.element_ty), mask=column < N)
