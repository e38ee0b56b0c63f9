"""Forward of experts over ragged rows.

    up_gated            h_m = [g, u] = x_index(m) W_up^T + b,  a_m = f(g) u       rows gathered while loading
    rows_times_weight   y_m = a_m W_down^T + b  (or dx_m = dh_m W_up)             rows as they lie
                        h_m = x_index(m) W_up^T + b,  a_m = f(h_m)                experts without a gate

Each may add a second, narrow product: an adapter's u_m B^T is some more columns of the same sum, so that what
comes out is written once.

Both are persistent: one program for each multiprocessor walks over the tiles. Weights come through TMA
descriptors, gathered rows through asynchronous 16-byte copies (Hopper's TMA cannot gather); with POINTERS
everything comes that way.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from moeclipse.ops.triton.activations import gated_value, value_of
from moeclipse.ops.triton.tiles import (
    eighths,
    halves,
    load_rows,
    load_weight,
    row_starts,
    row_tile,
    stagger,
    store_clipped,
    swizzle,
)


@triton.jit
def with_bias(value, bias, begin, column, end, BIAS: tl.constexpr, BN: tl.constexpr):
    """value plus bias[begin + column ...] in every row; columns from `end` on have none."""
    if BIAS:
        columns = column + tl.arange(0, BN)
        more = tl.load(bias + begin + columns, mask=columns < end, other=0.0)
        value = value + more.to(tl.float32)[None, :]
    return value


@triton.jit
def add_narrow(
    acc, u, b, expert, first, left, n, N, RANK: tl.constexpr, LAYOUT: tl.constexpr, POINTERS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """acc plus the product of u's RANK columns with an adapter's second weight, BR of them at once."""
    EVEN: tl.constexpr = RANK % BR == 0
    if RANK > 0:
        source, start = row_starts(u, None, first, left, RANK, False, POINTERS, BM)
        if RANK <= 2 * BR:
            for r in tl.static_range(0, RANK, BR):
                narrow = load_weight(b, expert, r, n, RANK, N, LAYOUT, POINTERS, EVEN, BR, BN)
                acc = tl.dot(load_rows(source, start, r, RANK, POINTERS, BR, EVEN), narrow, acc)
        else:  # more blocks than shared memory has room for at once
            for r in tl.range(0, RANK, BR, num_stages=1):
                narrow = load_weight(b, expert, r, n, RANK, N, LAYOUT, POINTERS, EVEN, BR, BN)
                acc = tl.dot(load_rows(source, start, r, RANK, POINTERS, BR, EVEN), narrow, acc)
    return acc


@triton.jit
def up_gated(
    x, index, w, bias, u, b, gate_out, up_out, a_out, tiles, num_tiles, capacity, x_stride, D, F,
    ACT: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, GATHER: tl.constexpr, POINTERS: tl.constexpr,
    EVEN: tl.constexpr, FLATTEN: tl.constexpr, GROUP: tl.constexpr, STAGGER: tl.constexpr,
    PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One tile: BM rows, BN columns of the gate and the same BN columns of the up-projection.

    w is [experts, 2, F, D], gate first; b is [experts, 2, F, RANK], u [rows, RANK].
    Expert 1, n = 2, BN = 128: one load brings w[1, 0, 256:384] and w[1, 1, 256:384], which multiply as 256
    columns, so both halves of an activation meet in one thread.
    """
    x_stride, D, F = eighths(x_stride), eighths(D), eighths(F)
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(F, BN)
    stagger(tl.cdiv(D, BK), PROGRAMS, STAGGER)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        m, n = swizzle(tile, num_m, num_n, GROUP)
        expert, first, left = row_tile(tiles, capacity, m)
        source, start = row_starts(x, index, first, left, x_stride, GATHER, POINTERS, BM)
        acc = tl.zeros((BM, 2 * BN), dtype=tl.float32)
        for k in range(0, D, BK):
            rows = load_rows(source, start, k, D, GATHER or POINTERS, BK, EVEN)
            weight = load_weight(w, expert, k, n, D, F, "gated", POINTERS, EVEN, BK, BN)
            acc = tl.dot(rows, weight, acc)
        acc = add_narrow(acc, u, b, expert, first, left, n, F, RANK, "gated", POINTERS, BM, BN, BR)
        gate, up = halves(acc)
        gate = with_bias(gate, bias, expert * 2 * F, n * BN, F, BIAS, BN)
        up = with_bias(up, bias, expert * 2 * F + F, n * BN, F, BIAS, BN)
        store_clipped(gate_out, first, left, n * BN, gate, 2 * F, F, POINTERS)
        store_clipped(up_out, first, left, n * BN, up, 2 * F, F, POINTERS)
        store_clipped(a_out, first, left, n * BN, gated_value(gate, up, ACT), F, F, POINTERS)


@triton.jit
def put_rows(
    out, a_out, first, left, column, value, bias, begin, N,
    ACT: tl.constexpr, BIAS: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Write some columns of a row tile, and beside them the activation, if there is one."""
    value = with_bias(value, bias, begin, column, N, BIAS, value.shape[1])
    store_clipped(out, first, left, column, value, N, N, POINTERS)
    if ACT != "none":
        store_clipped(a_out, first, left, column, value_of(value, ACT), N, N, POINTERS)


@triton.jit
def rows_times_weight(
    x, index, w, bias, u, b, scale, out, a_out, tiles, num_tiles, capacity, x_stride, K, N,
    ACT: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, SCALED: tl.constexpr, GATHER: tl.constexpr,
    POINTERS: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, FLATTEN: tl.constexpr,
    GROUP: tl.constexpr, STAGGER: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out_m = x_m W_e + u_m B_e: w is [experts, K, N], or [experts x N, K] when TRANSPOSED; b likewise."""
    x_stride, K, N = eighths(x_stride), eighths(K), eighths(N)
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(N, BN)
    LAYOUT: tl.constexpr = "transposed" if TRANSPOSED else "plain"
    stagger(tl.cdiv(K, BK), PROGRAMS, STAGGER)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        m, n = swizzle(tile, num_m, num_n, GROUP)
        expert, first, left = row_tile(tiles, capacity, m)
        source, start = row_starts(x, index, first, left, x_stride, GATHER, POINTERS, BM)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            rows = load_rows(source, start, k, K, GATHER or POINTERS, BK, EVEN)
            weight = load_weight(w, expert, k, n, K, N, LAYOUT, POINTERS, EVEN, BK, BN)
            acc = tl.dot(rows, weight, acc)
        acc = add_narrow(acc, u, b, expert, first, left, n, N, RANK, LAYOUT, POINTERS, BM, BN, BR)
        if SCALED:
            acc = acc * scale
        if SPLIT == 2:
            left_half, right_half = halves(acc)
            column, begin = n * BN, expert * N
            put_rows(out, a_out, first, left, column, left_half, bias, begin, N, ACT, BIAS, POINTERS)
            column += BN // 2
            put_rows(out, a_out, first, left, column, right_half, bias, begin, N, ACT, BIAS, POINTERS)
        else:
            put_rows(out, a_out, first, left, n * BN, acc, bias, expert * N, N, ACT, BIAS, POINTERS)
