"""Pairs on their way: packed where they leave, brought in the order of experts where they arrive.

pack         [address as bits, score] of each pair that leaves
unpack       a program for each part of a segment: rows, scores and places of its pairs
send_order   the way back for one number of each pair
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def pack(address, scores, place, packed_bits, packed, N, BLOCK: tl.constexpr):
    """address [7, 9], scores [.2, .3], place [1]: [[9 as bits, .3]]."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(place + pair, mask=pair < N, other=0)
    tl.store(packed_bits + 2 * pair, tl.load(address + at, mask=pair < N, other=0), mask=pair < N)
    tl.store(packed + 2 * pair + 1, tl.load(scores + at, mask=pair < N, other=0.0), mask=pair < N)


@triton.jit(
    do_not_specialize=["stride", "first"], do_not_specialize_on_alignment=["packed_bits", "packed", "table"]
)
def unpack(
    packed_bits, packed, table, row_M, score_M, places_RK, stride, first,
    K: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Address 5 with K = 2 in a segment whose rows begin at 3: row 5, whose second pair this is."""
    segment = tl.program_id(0)
    inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < tl.load(table + segment)
    came = tl.load(table + stride + segment) + inside - first
    at = tl.load(table + 2 * stride + segment) + inside
    address = tl.load(packed_bits + 2 * came, mask=mask, other=0)
    row = address // K + tl.load(table + 3 * stride + segment)
    tl.store(row_M + at, row - tl.load(table + 4 * stride + segment), mask=mask)
    tl.store(score_M + at, tl.load(packed + 2 * came + 1, mask=mask, other=0.0), mask=mask)
    place = row.to(tl.int64) * MOST + address % K
    tl.store(places_RK + place, at - tl.load(table + 5 * stride + segment), mask=mask)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["values", "table"])
def send_order(values, table, out, stride, BLOCK: tl.constexpr):
    """Lengths 1, 2 that went to 2, 0: values [4, 5, 6] become [6, 4, 5]."""
    segment = tl.program_id(0)
    inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < tl.load(table + segment)
    value = tl.load(values + tl.load(table + 2 * stride + segment) + inside, mask=mask, other=0.0)
    tl.store(out + tl.load(table + stride + segment) + inside, value, mask=mask)
