"""Turn pairs of components of queries and keys, and norm the heads before.

A row is one head of one token. Programs of queries come first, those of keys behind them, in one launch.
Inputs may have any strides between heads, outputs are written side by side.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def places(row, H, S, stride_b, stride_s, stride_h):
    """Where each row begins: row = token x H + head, token = sample x S + position."""
    token = row // H
    return (token // S) * stride_b + (token % S) * stride_s + (row % H) * stride_h


@triton.jit
def angles(table, row, H, R, P, pair, mask):
    """cos and sin of the rows' positions, as the table has them."""
    at = ((row // H) % R)[:, None] * P + pair[None, :]
    return tl.load(table + at, mask=mask, other=0.0), tl.load(table + R * P + at, mask=mask, other=0.0)


@triton.jit
def turn_rows(
    x, stride_b, stride_s, stride_h, H, out, weight, table, block, T, S, R, D, eps,
    NORM: tl.constexpr, BACK: tl.constexpr, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    pair = tl.arange(0, HALF)
    P = D // 2
    mask = (row < T * H)[:, None] & (pair < P)[None, :]
    left = pair * 2 if NEIGHBOURS else pair
    right = pair * 2 + 1 if NEIGHBOURS else pair + P
    begin = places(row, H, S, stride_b, stride_s, stride_h)
    first = tl.load(x + begin[:, None] + left[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + begin[:, None] + right[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(first * first + second * second, axis=1) / D + eps)
        w_first = tl.load(weight + left, mask=pair < P, other=0.0).to(tl.float32)
        w_second = tl.load(weight + right, mask=pair < P, other=0.0).to(tl.float32)
        first = first * scale[:, None] * w_first[None, :]
        second = second * scale[:, None] * w_second[None, :]
    cos, sin = angles(table, row, H, R, P, pair, mask)
    if BACK:
        sin = -sin
    dtype = out.dtype.element_ty
    at = out + row[:, None] * D
    tl.store(at + left[None, :], (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(at + right[None, :], (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit
def turn(
    q, q_b, q_s, q_h, H, k, k_b, k_s, k_h, G, q_out, k_out, q_weight, k_weight, table,
    T, S, R, D, q_blocks, eps,
    NORM: tl.constexpr, BACK: tl.constexpr, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A quarter turn: (1, 0) -> (0, 1); BACK: (0, 1) -> (1, 0)."""
    block = tl.program_id(0)
    if block < q_blocks:
        turn_rows(
            q, q_b, q_s, q_h, H, q_out, q_weight, table, block, T, S, R, D, eps,
            NORM, BACK, NEIGHBOURS, ROWS, HALF,
        )  # fmt: skip
    else:
        turn_rows(
            k, k_b, k_s, k_h, G, k_out, k_weight, table, block - q_blocks, T, S, R, D, eps,
            NORM, BACK, NEIGHBOURS, ROWS, HALF,
        )  # fmt: skip


@triton.jit
def turn_norm_backward(
    d_out, d_b, d_s, d_h, x, x_b, x_s, x_h, d_x, weight, d_weight, table, T, S, H, R, D, programs, eps,
    NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Back by the angle, then through the norm; program p leaves its part of dw in d_weight[p]."""
    program = tl.program_id(0)
    pair = tl.arange(0, HALF)
    P = D // 2
    left = pair * 2 if NEIGHBOURS else pair
    right = pair * 2 + 1 if NEIGHBOURS else pair + P
    w_first = tl.load(weight + left, mask=pair < P, other=0.0).to(tl.float32)
    w_second = tl.load(weight + right, mask=pair < P, other=0.0).to(tl.float32)
    sum_first = tl.zeros((HALF,), dtype=tl.float32)
    sum_second = tl.zeros((HALF,), dtype=tl.float32)
    for block in range(program, tl.cdiv(T * H, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < T * H)[:, None] & (pair < P)[None, :]
        begin = places(row, H, S, d_b, d_s, d_h)
        d_1 = tl.load(d_out + begin[:, None] + left[None, :], mask=mask, other=0.0).to(tl.float32)
        d_2 = tl.load(d_out + begin[:, None] + right[None, :], mask=mask, other=0.0).to(tl.float32)
        cos, sin = angles(table, row, H, R, P, pair, mask)
        d_first, d_second = d_1 * cos + d_2 * sin, d_2 * cos - d_1 * sin
        begin = places(row, H, S, x_b, x_s, x_h)
        first = tl.load(x + begin[:, None] + left[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x + begin[:, None] + right[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(first * first + second * second, axis=1) / D + eps)
        first, second = first * scale[:, None], second * scale[:, None]
        sum_first += tl.sum(d_first * first, axis=0)
        sum_second += tl.sum(d_second * second, axis=0)
        d_first, d_second = d_first * w_first[None, :], d_second * w_second[None, :]
        mean = tl.sum(d_first * first + d_second * second, axis=1) / D
        dtype = d_x.dtype.element_ty
        at = d_x + row[:, None] * D
        tl.store(
            at + left[None, :], (scale[:, None] * (d_first - first * mean[:, None])).to(dtype), mask=mask
        )
        tl.store(
            at + right[None, :], (scale[:, None] * (d_second - second * mean[:, None])).to(dtype), mask=mask
        )
    tl.store(d_weight + program * D + left, sum_first, mask=pair < P)
    tl.store(d_weight + program * D + right, sum_second, mask=pair < P)
