"""What the kernels over ragged rows share: which tile a program works on, and how tiles are read and written.

Rows are grouped by expert. A *row tile* is up to BM consecutive rows of one expert; the tile table, made on
the device by `grouping.tile_table`, says for each row tile its expert, its first row and where the expert's
rows end. Nothing on the host depends on how many rows an expert got.

Everything that touches memory has two forms, and POINTERS says at compile time which one a kernel is made of:
through descriptors of the copy engine (Hopper, Blackwell), or through pointers, which every GPU has. Gathered
rows always come through pointers.

Hazard: a tile at the end of an expert reads rows of the next one, or its own last row again. Stores go
through ragged descriptors, whose bounds the copy engine checks, or behind a mask: such rows are computed and
never written.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def row_tile(tiles, capacity, m):
    """(expert, first row, rows left in the expert) of row tile m.

    Experts with 130 and 40 rows, BM = 128: tiles (0, 0, 130), (0, 128, 2), (1, 130, 40).
    """
    expert = tl.load(tiles + m)
    first = tl.load(tiles + capacity + m)
    end = tl.load(tiles + 2 * capacity + m)
    return expert, first, end - first


@triton.jit
def swizzle(tile, num_m, num_n, GROUP: tl.constexpr):
    """(m, n) of a tile: GROUP row tiles sweep the columns together, so both operands stay in L2.

    num_m = 3, num_n = 2, GROUP = 2: tiles 0.. are (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    width = GROUP * num_n
    group = tile // width
    first = group * GROUP
    size = tl.minimum(num_m - first, GROUP)
    inside = tile - group * width
    return first + inside % size, inside // size


@triton.jit
def eighths(width):
    """The same number, known to be a multiple of 8: what the compiler needs to copy 16 bytes at once."""
    return width // 8 * 8


@triton.jit
def row_starts(
    x, index, first, left, stride, GATHER: tl.constexpr, POINTERS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """(x, of each row of a tile where it begins in x), for `load_rows`.

    Rows that do not exist read another one. index = [7, 2, 9], first = 1, left = 2, BM = 4: rows 2, 9, 0, 0;
    as they lie rows 1, 2, 2, 2, counted from row 1 on, in 32 bits. A descriptor is asked for row 1.
    """
    if GATHER:
        offset = tl.arange(0, BM)
        row = tl.load(index + first + offset, mask=offset < left, other=0)
        start = row.to(tl.int64)[:, None] * stride
    elif POINTERS:
        x += first.to(tl.int64) * stride
        start = tl.minimum(tl.arange(0, BM), left - 1)[:, None] * stride
    else:
        start = first
    return x, start


@triton.jit
def load_rows(x, start, k, width, POINTERS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Columns k to k + BK of the rows that begin at `start`; zeros past the width."""
    if POINTERS:
        column = k + tl.arange(0, BK)
        if EVEN:
            rows = tl.load(x + start + column[None, :])
        else:
            rows = tl.load(x + start + column[None, :], mask=(column < width)[None, :], other=0.0)
    else:
        rows = x.load([start, k])
    return rows


@triton.jit
def load_weight(
    w, expert, k, n, K, N,
    LAYOUT: tl.constexpr, POINTERS: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows k to k + BK and columns n * BN to (n + 1) * BN of an expert's [K, N] matrix.

    LAYOUT says how it lies: "plain" [experts, K, N], "transposed" [experts x N, K], or "gated" [experts, 2,
    N, K]: two transposed matrices, of which the same columns are loaded, so that 2 BN come out.
    Expert 3, N = 256, transposed, n = 1, BN = 128: w rows 896 to 1024, columns k to k + BK, turned over.
    """
    if not POINTERS:
        if LAYOUT == "gated":
            weight = tl.reshape(w.load([expert, 0, n * BN, k]), (2 * BN, BK)).T
        elif LAYOUT == "transposed":
            weight = w.load([expert * N + n * BN, k]).T
        else:
            weight = tl.reshape(w.load([expert, k, n * BN]), (BK, BN))
    elif LAYOUT == "plain":
        row, column = tl.arange(0, BK)[:, None], tl.arange(0, BN)[None, :]
        inside = column < N - n * BN
        if not EVEN:
            inside = inside & (row < K - k)
        first = w + (expert.to(tl.int64) * K + k) * N + n * BN
        weight = tl.load(first + (row * N + column), mask=inside, other=0.0)
    else:
        HALVES: tl.constexpr = 2 if LAYOUT == "gated" else 1
        place = tl.arange(0, HALVES * BN)
        row = place // BN * N + tl.minimum(place % BN, N - 1 - n * BN)
        first = w + (expert.to(tl.int64) * (HALVES * N) + n * BN) * K
        weight = load_rows(first, row[:, None] * K, k, K, True, BK, EVEN).T
    return weight


@triton.jit
def halves(value):
    """The left and the right half of the columns of a tile."""
    BM: tl.constexpr = value.shape[0]
    BN: tl.constexpr = value.shape[1]
    pair = tl.permute(tl.reshape(value, (BM, 2, BN // 2)), (0, 2, 1))
    return tl.split(pair)


@triton.jit
def load_clipped(rows, first, left, row, column, BM: tl.constexpr, BN: tl.constexpr):
    """Rows `row` on of the group that begins at `first` and has `left` rows; zeros past the group.

    `rows` is a ragged descriptor: its third axis is said to be 2^30 long, and the two axes before it shift
    the address back (2^30 steps of 2^34 - stride wrap around 64 bits), so that the group's end falls on the
    axis' end, where the copy engine stops by itself. first = 5, left = 3, row = 2: row 7, then zeros.
    """
    END: tl.constexpr = 1073741824
    return tl.reshape(rows.load([END, first + left, END - left + row, column]), (BM, BN))


@triton.jit
def store_clipped(rows, first, left, column, value, stride, width, POINTERS: tl.constexpr):
    """Write a tile to the group that begins at `first`; what lies past its `left` rows is dropped."""
    BM: tl.constexpr = value.shape[0]
    BN: tl.constexpr = value.shape[1]
    if POINTERS:
        row, columns = tl.arange(0, BM), column + tl.arange(0, BN)
        place = (first + row).to(tl.int64)[:, None] * stride + columns[None, :]
        inside = (row < left)[:, None] & (columns < width)[None, :]
        tl.store(rows + place, value.to(rows.dtype.element_ty), mask=inside)
    else:
        END: tl.constexpr = 1073741824
        value = tl.reshape(value.to(rows.dtype), (1, 1, BM, BN))
        rows.store([END, first + left, END - left, column], value)


@triton.jit
def stagger(steps, PROGRAMS: tl.constexpr, NS: tl.constexpr):
    """Let program p begin p / PROGRAMS of a tile late; a tile has `steps` steps of about NS nanoseconds.

    Programs that begin together also write together: all wait for the memory, then none uses it. Spread over
    one tile, they write one after the other. Neighbours, which read the same operands, stay close. With 132
    programs, 24 steps and NS = 800, program 66 waits 9.6 microseconds, once.
    """
    if NS > 0:
        wait = steps * NS * tl.program_id(0) // PROGRAMS
        tl.inline_asm_elementwise(
            """{
            .reg .u64 begin, now, wait;
            .reg .pred early;
            mov.u64 begin, %globaltimer;
            cvt.u64.u32 wait, $1;
            again: mov.u64 now, %globaltimer;
            sub.u64 now, now, begin;
            setp.lt.u64 early, now, wait;
            @early bra again;
            mov.u32 $0, 0;
            }""",
            "=r,r",
            [wait],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
