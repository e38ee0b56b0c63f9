"""Weight gradients of all experts in one kernel: out_e (+)= dy_e^T x_e over ragged groups of rows.

The reduction runs over an expert's rows, from its device offset to the next one: empty groups cost one
look, no group is padded, and nothing is copied to the host. Either operand may be gathered row by row.
Adding goes through the copy engine's reduction into fp32 (`reduce`), so that the sum never visits registers,
or through pointers (`add`). Each element receives exactly one addition, so two runs give the same bits.
Programs are staggered: when all add at once, all wait.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from moeclipse.ops.triton.tiles import eighths, halves, load_clipped, stagger, swizzle


@triton.jit
def rows_at(index, begin, k, count, GATHER: tl.constexpr, BK: tl.constexpr):
    """Which rows stand at places k to k + BK of a group; -1 past its end.

    index = [4, 9, 7], begin = 1, count = 2, k = 0, BK = 4: rows 9, 7, -1, -1.
    """
    if GATHER:
        place = k + tl.arange(0, BK)
        row = tl.load(index + begin + place, mask=place < count, other=-1)
    else:
        row = begin
    return row


@triton.jit
def group_rows(
    x, row, stride, begin, k, count, column, width,
    GATHER: tl.constexpr, POINTERS: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Places k to k + BK of a group, BW columns of each; places past the group are zero.

    A group of 3 rows that begins at row 5, k = 2, BK = 4: row 7 (or x[row[0]]), then three zero rows.
    """
    if GATHER or POINTERS:
        columns = column + tl.arange(0, BW)
        if GATHER:
            mask = (row >= 0)[:, None]
            start = row.to(tl.int64)[:, None] * stride
        else:
            place = tl.arange(0, BK)
            mask = (place < count - k)[:, None]
            x += (begin + k).to(tl.int64) * stride
            start = place[:, None] * stride
        if not EVEN:
            mask = mask & (columns < width)[None, :]
        rows = tl.load(x + start + columns[None, :], mask=mask, other=0.0)
    else:
        rows = load_clipped(x, begin, count, k, column, BK, BW)
    return rows


@triton.jit
def put(out, expert, row, column, value, N, D, MODE: tl.constexpr, POINTERS: tl.constexpr):
    """Write or add one piece of a tile; `add` is for pointers and for interpreters, which lack `reduce`."""
    if POINTERS:
        rows, columns = row + tl.arange(0, value.shape[0]), column + tl.arange(0, value.shape[1])
        place = out + expert.to(tl.int64) * N * D + rows.to(tl.int64)[:, None] * D + columns[None, :]
        inside = (rows < N)[:, None] & (columns < D)[None, :]
        if MODE == "add":
            value += tl.load(place, mask=inside, other=0.0)
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)
    else:
        value = tl.reshape(value.to(out.dtype), (1, value.shape[0], value.shape[1]))
        if MODE == "reduce":
            out.atomic_add([expert, row, column], value)
        elif MODE == "add":
            out.store([expert, row, column], value + out.load([expert, row, column]))
        else:
            out.store([expert, row, column], value)


@triton.jit
def put_tile(
    out, expert, row, column, acc, N, D,
    MODE: tl.constexpr, POINTERS: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """A tile in SPLIT pieces: less shared memory. A swapped tile is turned over on its way."""
    if SPLIT == 1:
        if SWAP:
            put(out, expert, row, column, acc.T, N, D, MODE, POINTERS)
        else:
            put(out, expert, row, column, acc, N, D, MODE, POINTERS)
    else:
        left, right = halves(acc)
        half: tl.constexpr = acc.shape[1] // 2
        put_tile(out, expert, row, column, left, N, D, MODE, POINTERS, SPLIT // 2, SWAP)
        if SWAP:
            put_tile(out, expert, row + half, column, right, N, D, MODE, POINTERS, SPLIT // 2, SWAP)
        else:
            put_tile(out, expert, row, column + half, right, N, D, MODE, POINTERS, SPLIT // 2, SWAP)


@triton.jit
def num_steps(
    offsets, num_experts, each, pid, PROGRAMS: tl.constexpr, BK: tl.constexpr, PADDED: tl.constexpr
):
    """Steps of one program: for each of its tiles the blocks of BK rows of that expert, at least one.

    Groups of 100 and 0 rows, 3 tiles each, 2 programs, BK = 64: program 0 has tiles 0, 2, 4: 2 + 2 + 1 steps.
    """
    expert = tl.arange(0, PADDED)
    known = expert < num_experts
    begin = tl.load(offsets + expert, mask=known, other=0)
    end = tl.load(offsets + expert + 1, mask=known, other=0)
    steps = tl.maximum((end - begin + BK - 1) // BK, 1)
    behind = expert * each + PROGRAMS - 1 - pid
    mine = (behind + each) // PROGRAMS - behind // PROGRAMS
    return tl.sum(tl.where(known, steps * mine, 0), 0)


@triton.jit
def walk_tiles(
    dy, dy_index, dy_stride, x, x_index, x_stride, out, offsets, num_experts, N, D,
    GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, POINTERS: tl.constexpr, EVEN: tl.constexpr,
    MODE: tl.constexpr, AHEAD: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A loop over tiles, and in it one over an expert's rows. Faster where rows are gathered.

    offsets = [0, 3, 3, 8], one tile each: three rounds, over rows 0..2, over none, over rows 3..7.
    """
    WIDE_DY: tl.constexpr = BN if SWAP else BM
    WIDE_X: tl.constexpr = BM if SWAP else BN
    num_dy = tl.cdiv(N, WIDE_DY)
    num_x = tl.cdiv(D, WIDE_X)
    each = num_dy * num_x
    for tile in tl.range(tl.program_id(0), num_experts * each, PROGRAMS):
        expert = tile // each
        m, n = swizzle(tile - expert * each, num_dy, num_x, GROUP)
        row, column = m * WIDE_DY, n * WIDE_X
        begin = tl.load(offsets + expert)
        count = tl.load(offsets + expert + 1) - begin
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        dy_row = rows_at(dy_index, begin, 0, count, GATHER_DY, BK)
        x_row = rows_at(x_index, begin, 0, count, GATHER_X, BK)
        for k in range(0, count, BK):
            if not AHEAD:
                dy_row = rows_at(dy_index, begin, k, count, GATHER_DY, BK)
                x_row = rows_at(x_index, begin, k, count, GATHER_X, BK)
            dy_rows = group_rows(
                dy, dy_row, dy_stride, begin, k, count, row, N, GATHER_DY, POINTERS, EVEN, BK, WIDE_DY
            )
            x_rows = group_rows(
                x, x_row, x_stride, begin, k, count, column, D, GATHER_X, POINTERS, EVEN, BK, WIDE_X
            )
            if AHEAD:
                dy_row = rows_at(dy_index, begin, k + BK, count, GATHER_DY, BK)
                x_row = rows_at(x_index, begin, k + BK, count, GATHER_X, BK)
            if SWAP:
                acc = tl.dot(x_rows.T, dy_rows, acc)
            else:
                acc = tl.dot(dy_rows.T, x_rows, acc)
        if MODE == "store" or count > 0:
            put_tile(out, expert, row, column, acc, N, D, MODE, POINTERS, SPLIT, SWAP)


@triton.jit
def walk_steps(
    dy, dy_index, dy_stride, x, x_index, x_stride, out, offsets, num_experts, N, D,
    GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, POINTERS: tl.constexpr, EVEN: tl.constexpr,
    MODE: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, PADDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Tiles and their blocks of rows as one loop: the next tile's rows travel while a tile is written.

    offsets = [0, 3, 3, 8], one tile each, BK = 4: four steps, one each for experts 0 and 1, two for expert 2.
    """
    WIDE_DY: tl.constexpr = BN if SWAP else BM
    WIDE_X: tl.constexpr = BM if SWAP else BN
    num_dy = tl.cdiv(N, WIDE_DY)
    num_x = tl.cdiv(D, WIDE_X)
    each = num_dy * num_x
    pid = tl.program_id(0)
    steps = num_steps(offsets, num_experts, each, pid, PROGRAMS, BK, PADDED)
    tile, expert, row, column, begin, count, k = pid - PROGRAMS, 0, 0, 0, 0, 0, 0
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(0, steps):
        if k >= count:
            tile += PROGRAMS
            expert = tile // each
            m, n = swizzle(tile - expert * each, num_dy, num_x, GROUP)
            row, column, k = m * WIDE_DY, n * WIDE_X, 0
            begin = tl.load(offsets + expert)
            count = tl.load(offsets + expert + 1) - begin
        dy_row = rows_at(dy_index, begin, k, count, GATHER_DY, BK)
        x_row = rows_at(x_index, begin, k, count, GATHER_X, BK)
        dy_rows = group_rows(
            dy, dy_row, dy_stride, begin, k, count, row, N, GATHER_DY, POINTERS, EVEN, BK, WIDE_DY
        )
        x_rows = group_rows(
            x, x_row, x_stride, begin, k, count, column, D, GATHER_X, POINTERS, EVEN, BK, WIDE_X
        )
        # Asked before k moves on: a k that both ends of a step look at would keep loads from being pipelined.
        last = count - k <= BK
        k += BK
        if SWAP:
            acc = tl.dot(x_rows.T, dy_rows, acc)
        else:
            acc = tl.dot(dy_rows.T, x_rows, acc)
        if MODE != "store":
            # An expert without rows has summed zeros: there is nothing to add and nothing to reset.
            last = last & (count > 0)
        if last:
            put_tile(out, expert, row, column, acc, N, D, MODE, POINTERS, SPLIT, SWAP)
            acc = tl.zeros((BM, BN), dtype=tl.float32)


@triton.jit
def grouped_wgrad(
    dy, dy_index, dy_stride, x, x_index, x_stride, out, offsets, num_experts, N, D,
    GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, POINTERS: tl.constexpr, EVEN: tl.constexpr,
    MODE: tl.constexpr, FLATTEN: tl.constexpr, AHEAD: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr,
    STAGGER: tl.constexpr, PROGRAMS: tl.constexpr, PADDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's gradient [N, D] is BM x BN elements, or BN x BM when SWAP.

    SWAP computes x^T dy: gathered rows of x then stand on the side of the product that is BM wide.
    AHEAD reads row numbers one step ahead into registers; else they travel through the pipeline.
    offsets = [0, 3, 3, 8]: expert 0 sums over rows 0..2, expert 1 has none (its tiles add nothing, or write
    zeros), expert 2 sums over rows 3..7.
    """
    dy_stride, x_stride, N, D = eighths(dy_stride), eighths(x_stride), eighths(N), eighths(D)
    if STAGGER > 0:
        stagger(tl.load(offsets + num_experts) // (num_experts * BK), PROGRAMS, STAGGER)
    if FLATTEN:
        walk_steps(
            dy, dy_index, dy_stride, x, x_index, x_stride, out, offsets, num_experts, N, D,
            GATHER_DY, GATHER_X, POINTERS, EVEN, MODE, SWAP, GROUP, PROGRAMS, PADDED, BM, BN, BK, SPLIT,
        )  # fmt: skip
    else:
        walk_tiles(
            dy, dy_index, dy_stride, x, x_index, x_stride, out, offsets, num_experts, N, D,
            GATHER_DY, GATHER_X, POINTERS, EVEN, MODE, AHEAD, SWAP, GROUP, PROGRAMS, BM, BN, BK, SPLIT,
        )  # fmt: skip
