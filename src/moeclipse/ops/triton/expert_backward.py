"""Backward of the down-projection and the activation in one kernel.

    dA_m = dO_index(m) W_down          one row for each pair, gathered while loading
    g, u = h_m,  a = silu(g) u         rebuilt from the pre-activation, which is all that forward kept
    dscore_m = <dA_m, a>               in parts, one for each column tile: neither Y nor dY is needed
    da = score_m dA_m                  dg = da u silu'(g),  du = da silu(g)
    scaled_m = score_m a               the operand of the weight gradient of W_down

The score gradient's parts are stored and added by whoever reads them, in a fixed order: no atomics.
"""

import triton
import triton.language as tl

from moeclipse.ops.triton.tiles import halves, load_rows, row_starts, row_tile, store_clipped, swizzle


@triton.jit
def swiglu_tile(d_a, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column):
    """The epilogue of some columns; returns their part of the score gradient.

    g = 0, u = 2, dA = 1, score = 0.5: a = 0, dg = 0.5 * 2 * 0.5 = 0.5, du = 0, the part is 0.
    """
    g = gate_in.load([first, column]).to(tl.float32)
    u = up_in.load([first, column]).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    a = silu * u
    part = tl.sum(d_a * a, axis=1)
    store_clipped(scaled, first, left, column, (a * score[:, None]))
    d_a = d_a * score[:, None]
    store_clipped(d_up, first, left, column, (d_a * silu))
    d_g = d_a * u * (sigmoid + silu * (1.0 - sigmoid))
    store_clipped(d_gate, first, left, column, d_g)
    return part


@triton.jit
def d_hidden(
    dy, index, w, scores, gate_in, up_in, d_gate, d_up, scaled, d_score, tiles, num_tiles, capacity,
    num_rows, dy_stride, D, F,
    GATHER: tl.constexpr, EVEN: tl.constexpr, FLATTEN: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile: BM rows, BN hidden columns; w is [experts, D, F] and d_score [column tiles, rows].

    F = 256, BN = 128: row m has two parts, d_score[0, m] over columns 0..127 and d_score[1, m] over the rest.
    """
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(F, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        m, n = swizzle(tile, num_m, num_n, GROUP)
        expert, first, left = row_tile(tiles, capacity, m)
        start = row_starts(dy, index, first, left, dy_stride, GATHER, BM)
        offset = tl.arange(0, BM)
        score = tl.load(scores + first + offset, mask=offset < left, other=0.0)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, D, BK):
            rows = load_rows(dy, start, k, D, GATHER, BK, EVEN)
            weight = tl.reshape(w.load([expert, k, n * BN]), (BK, BN))
            acc = tl.dot(rows, weight, acc)
        column = n * BN
        if SPLIT == 1:
            part = swiglu_tile(acc, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column)
        else:
            acc_0, acc_1 = halves(acc)
            if SPLIT == 2:
                part = swiglu_tile(acc_0, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column)
                column += BN // 2
                part += swiglu_tile(acc_1, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column)
            else:
                acc_00, acc_01 = halves(acc_0)
                acc_10, acc_11 = halves(acc_1)
                part = swiglu_tile(acc_00, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column)
                column += BN // 4
                part += swiglu_tile(acc_01, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column)
                column += BN // 4
                part += swiglu_tile(acc_10, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column)
                column += BN // 4
                part += swiglu_tile(acc_11, score, gate_in, up_in, d_gate, d_up, scaled, first, left, column)
        tl.store(d_score + n * num_rows + first + offset, part, mask=offset < left)
