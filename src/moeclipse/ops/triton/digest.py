"""The part of a digest that one span of a row gives: whole numbers modulo 2^64, so no order matters."""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def digest_span(
    bits, parts, num_columns, spans,
    MIXER: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over the span of bits[c, i] odd(i) odd(c); a span lies in one chunk."""
    program = tl.program_id(0)
    row, span = (program // spans).to(tl.int64), (program % spans).to(tl.int64)
    start = span * SPAN
    mixer = tl.full((1,), MIXER, dtype=tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for first in range(0, SPAN, BLOCK):
        column = start + first + tl.arange(0, BLOCK)
        value = tl.load(bits + row * num_columns + column, mask=column < num_columns, other=0).to(tl.int64)
        total += value * (((column % CHUNK) + 1) * mixer | 1)
    of_chunk = ((start // CHUNK) * mixer & ((1 << 62) - 1)) * 2 + 1
    tl.store(parts + program + tl.arange(0, 1), tl.sum(total, axis=0) * of_chunk)
