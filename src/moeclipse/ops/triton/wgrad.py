"""Weight gradients of all experts in one kernel: out_e (+)= dy_e^T x_e over ragged groups of rows.

The reduction runs over an expert's rows, from its device offset to the next one: empty groups cost one
look, no group is padded, and nothing is copied to the host. Either operand may be gathered row by row.
Adding goes through the copy engine's reduction into fp32 (`reduce`): the sum never visits registers, and
each element receives exactly one addition, so two runs give the same bits.
"""

import triton
import triton.language as tl

from moeclipse.ops.triton.tiles import halves, load_clipped, swizzle


@triton.jit
def group_rows(
    x, index, stride, begin, k, count, column, width,
    GATHER: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Rows k to k + BK of a group, BW columns of each; rows past the group are zero.

    A group of 3 rows that begins at row 5, k = 2, BK = 4: row 7 (or x[index[7]]), then three zero rows.
    """
    if GATHER:
        offset = k + tl.arange(0, BK)
        inside = offset < count
        row = tl.load(index + begin + offset, mask=inside, other=0)
        columns = column + tl.arange(0, BW)
        mask = inside[:, None]
        if not EVEN:
            mask = mask & (columns < width)[None, :]
        rows = tl.load(x + row.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    else:
        rows = load_clipped(x, begin, count, k, column, BK, BW)
    return rows


@triton.jit
def put(out, expert, row, column, value, MODE: tl.constexpr):
    """Write or add one piece of a tile; `add` is `reduce` for interpreters that lack it."""
    value = tl.reshape(value.to(out.dtype), (1, value.shape[0], value.shape[1]))
    if MODE == "reduce":
        out.atomic_add([expert, row, column], value)
    elif MODE == "add":
        out.store([expert, row, column], value + out.load([expert, row, column]))
    else:
        out.store([expert, row, column], value)


@triton.jit
def grouped_wgrad(
    dy, dy_index, dy_stride, x, x_index, x_stride, out, offsets, num_experts, N, D,
    GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, EVEN: tl.constexpr, MODE: tl.constexpr,
    FLATTEN: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile: BM x BN elements of one expert's gradient [N, D].

    offsets = [0, 3, 3, 8]: expert 0 sums over rows 0..2, expert 1 has none (its tiles add nothing, or write
    zeros), expert 2 sums over rows 3..7.
    """
    num_m = tl.cdiv(N, BM)
    num_n = tl.cdiv(D, BN)
    each = num_m * num_n
    for tile in tl.range(tl.program_id(0), num_experts * each, PROGRAMS, flatten=FLATTEN):
        expert = tile // each
        m, n = swizzle(tile - expert * each, num_m, num_n, GROUP)
        begin = tl.load(offsets + expert)
        count = tl.load(offsets + expert + 1) - begin
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, count, BK):
            dy_rows = group_rows(
                dy, dy_index, dy_stride, begin, k, count, m * BM, N, GATHER_DY, EVEN, BK, BM
            )
            x_rows = group_rows(x, x_index, x_stride, begin, k, count, n * BN, D, GATHER_X, EVEN, BK, BN)
            acc = tl.dot(dy_rows.T, x_rows, acc)
        if MODE == "store" or count > 0:
            if SPLIT == 1:
                put(out, expert, m * BM, n * BN, acc, MODE)
            else:
                acc_0, acc_1 = halves(acc)
                if SPLIT == 2:
                    put(out, expert, m * BM, n * BN, acc_0, MODE)
                    put(out, expert, m * BM, n * BN + BN // 2, acc_1, MODE)
                else:
                    acc_00, acc_01 = halves(acc_0)
                    acc_10, acc_11 = halves(acc_1)
                    put(out, expert, m * BM, n * BN, acc_00, MODE)
                    put(out, expert, m * BM, n * BN + BN // 4, acc_01, MODE)
                    put(out, expert, m * BM, n * BN + BN // 2, acc_10, MODE)
                    put(out, expert, m * BM, n * BN + 3 * BN // 4, acc_11, MODE)
