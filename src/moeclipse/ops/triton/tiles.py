"""What the kernels over ragged rows share: which tile a program works on, and reading rows.

Rows are grouped by expert. A *row tile* is up to BM consecutive rows of one expert; the tile table, made on
the device by `grouping.tile_table`, says for each row tile its expert, its first row and where the expert's
rows end. Nothing on the host depends on how many rows an expert got.

Hazard: a tile at the end of an expert reads rows of the next one. Stores go through ragged descriptors,
whose bounds the copy engine checks, so such rows are computed and never written.
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
def row_starts(index, first, left, stride, GATHER: tl.constexpr, BM: tl.constexpr):
    """Of each row of a tile where it begins in x; rows that do not exist read the first one.

    index = [7, 2, 9], first = 1, left = 2, BM = 4: rows 2, 9, 0, 0.
    """
    if GATHER:
        offset = tl.arange(0, BM)
        row = tl.load(index + first + offset, mask=offset < left, other=0)
        start = row.to(tl.int64)[:, None] * stride
    else:
        start = first
    return start


@triton.jit
def load_rows(x, start, k, width, GATHER: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Columns k to k + BK of a row tile: gathered through pointers, or as they lie through a descriptor."""
    if GATHER:
        column = k + tl.arange(0, BK)
        if EVEN:
            rows = tl.load(x + start + column[None, :])
        else:
            rows = tl.load(x + start + column[None, :], mask=(column < width)[None, :], other=0.0)
    else:
        rows = x.load([start, k])
    return rows


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
def store_clipped(rows, first, left, column, value):
    """Write a tile to the group that begins at `first`; what lies past its `left` rows is dropped."""
    END: tl.constexpr = 1073741824
    value = tl.reshape(value.to(rows.dtype), (1, 1, value.shape[0], value.shape[1]))
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
