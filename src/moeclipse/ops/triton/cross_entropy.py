"""Three numbers of each row of logits, and the gradient of the loss: one read, and one read and write."""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def statistics(logits, targets, out, T, V, BLOCK: tl.constexpr):
    """logits [0, 1, 1], target 1: largest 1, sum 2 + 1/e, logit 1."""
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * V
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(begin + column, mask=column < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, value)
        # A column that has seen nothing yet stays at zero: the difference of two infinities is no number.
        seen = higher > float("-inf")
        total = tl.where(seen, total * tl.exp(largest - higher) + tl.exp(value - higher), 0.0)
        largest = higher
    peak = tl.max(largest)
    tl.store(out + row, peak)
    tl.store(out + T + row, tl.sum(tl.where(largest > float("-inf"), total * tl.exp(largest - peak), 0.0)))
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    tl.store(out + 2 * T + row, tl.load(begin + target, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def gradient(logits, log_sums, targets, d_loss, out, V, BLOCK: tl.constexpr):
    """logits [0, 0], log sum ln 2, target 1, d_loss 1: [0.5, -0.5]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * V + column, mask=column < V, other=0.0).to(tl.float32)
    d = tl.exp(value - tl.load(log_sums + row))
    d = tl.where(column == tl.load(targets + row), d - 1.0, d) * tl.load(d_loss).to(tl.float32)
    tl.store(out + row * V + column, d.to(out.dtype.element_ty), mask=column < V)
