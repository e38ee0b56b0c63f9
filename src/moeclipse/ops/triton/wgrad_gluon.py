"""Weight gradients whose warps divide the work (Hopper): out_e (+)= dy_e^T x_e over ragged groups of rows.

Three roles share a multiprocessor. Some warps *load*: they fill a ring of STAGES blocks of BK rows. One warp
is enough for rows in order, through the copy engine; gathered rows take four, which copy 16 bytes a thread
and meanwhile read the next row numbers. Two groups of four warps *multiply*: each owns half of the rows of a
[BM, BN] tile and keeps its sums in registers; both read the same block of x. Each writes its half through
BUFFERS small pieces of shared memory, filling one while the copy engine reads the others, and goes on to the
next tile before the last ones are read. The second group writes after the first: so they drift apart, and
while one writes, the other has the tensor cores for itself.

Contract: as `wgrad.grouped_wgrad`, with at most one operand gathered. Adding goes through the copy engine's
reduction, one addition for each element, so two runs give the same bits.

Hazard: BUFFERS must divide the number of pieces of half a tile: buffers are taken in turn, and waiting for
"all but the last BUFFERS - 1" frees the next one only if the turn goes on unbroken from tile to tile.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@_core.builtin
def reduce_add(out, coordinates, piece, _semantic=None):
    """What later versions call `tma.async_atomic_add`."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = _core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, out.handle, coordinates, piece.handle)


# Names changed between versions.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
add_out = getattr(tma, "async_atomic_add", None) or reduce_add


@gluon.jit
def tile_at(tile, walk, GROUP: gl.constexpr):
    """(expert, row tile, column tile, first row, rows) of a tile; tiles past the last are the last.

    GROUP row tiles sweep the columns together, so that both operands stay in L2.
    """
    offsets, num_tiles, num_m, num_n = walk
    tile = gl.minimum(tile, num_tiles - 1)
    expert = tile // (num_m * num_n)
    tile -= expert * (num_m * num_n)
    group = tile // (GROUP * num_n)
    tile -= group * (GROUP * num_n)
    size = gl.minimum(num_m - group * GROUP, GROUP)
    begin = gl.load(offsets + expert)
    count = gl.load(offsets + expert + 1) - begin
    return expert, group * GROUP + tile % size, tile // size, begin, count


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next slot of the ring; the phase turns with each round. STAGES = 2: 0 0, 1 0, 0 1, 1 1, 0 0."""
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def load_block(rows, ring, slot, bar, begin, count, k, column):
    """Rows k to k + BK of a group into a slot; zeros past the group (see `tiles.load_clipped`)."""
    END: gl.constexpr = 1073741824
    into = ring.index(slot).reshape([1, 1, ring.shape[1], ring.shape[2]])
    copy_in(rows, [END, begin + count, END - count + k, column], bar, into)


@gluon.jit
def load_tiles(dy, x, slots, upper, lower, right, GROUP: gl.constexpr, PROGRAMS: gl.constexpr):
    """The loading warp: every block of every tile of this program, as slots become free.

    Two tiles of 3 blocks, STAGES = 4: blocks 0..3 at once, block 4 when both groups are through with block 0.
    """
    walk, full, free = slots
    STAGES: gl.constexpr = right.shape[0]
    BK: gl.constexpr = right.shape[1]
    HALF: gl.constexpr = upper.shape[2]
    BN: gl.constexpr = right.shape[2]
    BYTES: gl.constexpr = BK * (2 * HALF + BN) * dy.dtype.primitive_bitwidth // 8
    slot, phase = 0, 1
    _, m, n, begin, count = tile_at(gl.program_id(0), walk, GROUP)
    for tile in range(gl.program_id(0), walk[1], PROGRAMS):
        # Asked for early: reading offsets takes as long as a block.
        _, next_m, next_n, next_begin, next_count = tile_at(tile + PROGRAMS, walk, GROUP)
        for k in range(0, count, BK):
            mbarrier.wait(free.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            load_block(x, right, slot, bar, begin, count, k, n * BN)
            load_block(dy, upper, slot, bar, begin, count, k, m * 2 * HALF)
            load_block(dy, lower, slot, bar, begin, count, k, m * 2 * HALF + HALF)
            slot, phase = advance(slot, phase, STAGES)
        m, n, begin, count = next_m, next_n, next_begin, next_count


@gluon.jit
def rows_at(index, begin, k, count, BK: gl.constexpr, LAYOUT: gl.constexpr):
    """Which rows stand at places k to k + BK of a group; -1 past its end (see `wgrad.rows_at`)."""
    place = k + gl.arange(0, BK, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(index + begin + place, mask=place < count, other=-1)


@gluon.jit
def fetch_block(source, row, stride, column, width, ring, slot, LAYOUT: gl.constexpr):
    """The named rows into a slot, from a column on; zeros for row -1 and past the width.

    Rows 4 and -1, column 64, stride 10 (rows of 80), width 10 (in eighths): x[4, 64:80], zeros, then a row of
    zeros. Eighths, because a copy of 8 elements must be known to be wholly inside or wholly outside.
    """
    inside = gl.arange(0, ring.shape[2], layout=gl.SliceLayout(0, LAYOUT))
    start = row.to(gl.int64) * (stride * 8) + column
    mask = (row >= 0)[:, None] & (inside // 8 < width - column // 8)[None, :]
    copy_rows(ring.index(slot), source + start[:, None] + inside[None, :], mask=mask)


@gluon.jit
def fetch_tiles(
    dy, x, index, stride, width, slots, upper, lower, right,
    GATHER: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The four loading warps where x or dy is gathered: as `load_tiles`, row numbers one block ahead.

    Groups of 3 and 5 rows, BK = 4: while places 0..2 load, numbers 3..6 are read, then number 7, then the
    next tile's. A slot is full when the copy engine's bytes and the copies of all 128 threads are there.
    """
    walk, full, free = slots
    STAGES: gl.constexpr = right.shape[0]
    BK: gl.constexpr = right.shape[1]
    HALF: gl.constexpr = upper.shape[2]
    BN: gl.constexpr = right.shape[2]
    BYTES: gl.constexpr = BK * (2 * HALF if GATHER == "x" else BN) * right.dtype.primitive_bitwidth // 8
    # Eight threads copy 128 bytes of a row.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot, phase = 0, 1
    _, m, n, begin, count = tile_at(gl.program_id(0), walk, GROUP)
    row = rows_at(index, begin, 0, count, BK, LAYOUT)
    for tile in range(gl.program_id(0), walk[1], PROGRAMS):
        _, next_m, next_n, next_begin, next_count = tile_at(tile + PROGRAMS, walk, GROUP)
        for k in range(0, count, BK):
            last = k + BK >= count
            ahead_begin, ahead_count = gl.where(last, next_begin, begin), gl.where(last, next_count, count)
            next_row = rows_at(index, ahead_begin, gl.where(last, 0, k + BK), ahead_count, BK, LAYOUT)
            mbarrier.wait(free.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            if GATHER == "x":
                load_block(dy, upper, slot, bar, begin, count, k, m * 2 * HALF)
                load_block(dy, lower, slot, bar, begin, count, k, m * 2 * HALF + HALF)
                fetch_block(x, row, stride, n * BN, width, right, slot, LAYOUT)
            else:
                load_block(x, right, slot, bar, begin, count, k, n * BN)
                fetch_block(dy, row, stride, m * 2 * HALF, width, upper, slot, LAYOUT)
                fetch_block(dy, row, stride, m * 2 * HALF + HALF, width, lower, slot, LAYOUT)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            row = next_row
            slot, phase = advance(slot, phase, STAGES)
        if count == 0:
            row = rows_at(index, next_begin, 0, next_count, BK, LAYOUT)
        m, n, begin, count = next_m, next_n, next_begin, next_count


@gluon.jit
def halves(value):
    """The left and the right half of the columns."""
    BM: gl.constexpr = value.shape[0]
    BN: gl.constexpr = value.shape[1]
    return value.reshape([BM, 2, BN // 2]).permute((0, 2, 1)).split()


@gluon.jit
def write(out, expert, row, column, sums, staging, FIRST: gl.constexpr, ADD: gl.constexpr):
    """Half a tile in pieces as large as the staging buffers, which take turns.

    64 x 256 sums, two buffers 64 x 32: eight pieces through buffers 0, 1, 0, 1, ...
    """
    TALL: gl.constexpr = sums.shape[0]
    WIDE: gl.constexpr = sums.shape[1]
    HIGH: gl.constexpr = staging.shape[2]
    PIECE: gl.constexpr = staging.shape[3]
    BUFFERS: gl.constexpr = staging.shape[0]
    if HIGH < TALL:
        top, bottom = sums.reshape([2, TALL // 2, WIDE]).permute((1, 2, 0)).split()
        BELOW: gl.constexpr = FIRST + TALL // 2 // HIGH * (WIDE // PIECE)
        write(out, expert, row, column, top, staging, FIRST, ADD)
        write(out, expert, row + TALL // 2, column, bottom, staging, BELOW, ADD)
    elif PIECE < WIDE:
        left, right = halves(sums)
        write(out, expert, row, column, left, staging, FIRST, ADD)
        write(out, expert, row, column + WIDE // 2, right, staging, FIRST + WIDE // 2 // PIECE, ADD)
    else:
        tma.store_wait(pendings=BUFFERS - 1)
        piece = staging.index(FIRST % BUFFERS)
        piece.store(sums.to(out.dtype).reshape([1, TALL, WIDE]))
        fence_async_shared()
        if ADD:
            add_out(out, [expert, row, column], piece)
        else:
            copy_out(out, [expert, row, column], piece)


@gluon.jit
def multiply_tiles(
    out, slots, left, right, turn, staging, SECOND: gl.constexpr, GATHERED: gl.constexpr,
    ADD: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One group's half of every tile of this program: sums over an expert's blocks, then writes.

    offsets = [0, 3, 3, 8], BK = 4: one block, none (nothing to add, or zeros to write), two blocks.
    """
    walk, full, free = slots
    STAGES: gl.constexpr = right.shape[0]
    BK: gl.constexpr = right.shape[1]
    HALF: gl.constexpr = left.shape[2]
    BN: gl.constexpr = right.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    slot, phase, turns = 0, 0, 0
    expert, m, n, _, count = tile_at(gl.program_id(0), walk, GROUP)
    for tile in range(gl.program_id(0), walk[1], PROGRAMS):
        next_expert, next_m, next_n, _, next_count = tile_at(tile + PROGRAMS, walk, GROUP)
        sums = gl.zeros([HALF, BN], gl.float32, SUMS)
        for k in range(0, count, BK):
            mbarrier.wait(full.index(slot), phase)
            if GATHERED:
                # What threads copied, unlike the copy engine, tensor cores see behind a fence only.
                fence_async_shared()
            dy_block = left.index(slot).permute((1, 0))
            sums = warpgroup_mma(dy_block, right.index(slot), sums, use_acc=k > 0, is_async=True)
            # One product stays in flight; the one before it has read its slot.
            sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
            mbarrier.arrive(free.index((slot + STAGES - 1) % STAGES), pred=k > 0)
            slot, phase = advance(slot, phase, STAGES)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(free.index((slot + STAGES - 1) % STAGES), pred=count > 0)
        # Shorter tiles take no turns: the first group could be two ahead, and turns have two phases only.
        in_turn = count > STAGES * BK
        if SECOND:
            mbarrier.wait(turn, turns & 1, pred=in_turn)
            turns += in_turn.to(gl.int32)
        if (not ADD) or count > 0:
            write(out, expert, m * 2 * HALF + SECOND * HALF, n * BN, sums, staging, 0, ADD)
        if not SECOND:
            mbarrier.arrive(turn, pred=in_turn)
        expert, m, n, count = next_expert, next_m, next_n, next_count
    tma.store_wait(pendings=0)


@gluon.jit
def stagger(wait):
    """Hold a program back for so many nanoseconds (see `tiles.stagger`)."""
    gl.inline_asm_elementwise(
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
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def init_barriers(full, free, turn, GATHERED: gl.constexpr):
    """A slot is full after one arrival, or that and 128 threads' if rows are gathered, and free after two."""
    STAGES: gl.constexpr = full.shape[0]
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=129 if GATHERED else 1)
        mbarrier.init(free.index(slot), count=2)
    mbarrier.init(turn, count=1)
    fence_async_shared()


@gluon.jit(do_not_specialize=["stride", "num_experts", "N", "D"])
def grouped_wgrad(
    dy, x, index, stride, out, offsets, num_experts, N, D, GATHER: gl.constexpr,
    ADD: gl.constexpr, GROUP: gl.constexpr, STAGGER: gl.constexpr, PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """dy and x are ragged descriptors of [BK, BM / 2] and [BK, BN] blocks, out one of [1, 64, PIECE].

    The operand that GATHER names ("dy", "x" or "none") is a pointer instead: index has its row at each place,
    and its rows are 8 x stride elements apart.
    offsets = [0, 3, 3, 8]: expert 0 sums over rows 0..2, expert 1 has none, expert 2 sums over rows 3..7.
    """
    HALF: gl.constexpr = BM // 2
    HIGH: gl.constexpr = out.block_shape[1]
    PIECE: gl.constexpr = out.block_shape[2]
    PIECES: gl.constexpr = HALF // HIGH * (BN // PIECE)
    gl.static_assert(PIECES % BUFFERS == 0, "staging buffers must divide the pieces of a tile")
    DTYPE: gl.constexpr = x.dtype if GATHER == "dy" else dy.dtype
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    GATHERED: gl.constexpr = GATHER != "none"
    num_m = (N + BM - 1) // BM
    num_n = (D + BN - 1) // BN
    walk = (offsets, num_experts * num_m * num_n, num_m, num_n)
    right = gl.allocate_shared_memory(DTYPE, [STAGES, BK, BN], BLOCK)
    upper = gl.allocate_shared_memory(DTYPE, [STAGES, BK, HALF], BLOCK)
    lower = gl.allocate_shared_memory(DTYPE, [STAGES, BK, HALF], BLOCK)
    staging_0 = gl.allocate_shared_memory(out.dtype, [BUFFERS, 1, HIGH, PIECE], out.layout)
    staging_1 = gl.allocate_shared_memory(out.dtype, [BUFFERS, 1, HIGH, PIECE], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    init_barriers(full, free, turn, GATHERED)
    if STAGGER > 0:
        steps = gl.load(offsets + num_experts) // (num_experts * BK)
        stagger(steps * STAGGER * gl.program_id(0) // PROGRAMS)
    slots = (walk, full, free)
    # Registers of a thread: 504 for the three.
    if GATHERED:
        width = (D if GATHER == "x" else N) // 8
        gl.warp_specialize([
            (multiply_tiles, (out, slots, upper, right, turn, staging_0, False, True, ADD, GROUP, PROGRAMS)),
            (multiply_tiles, (out, slots, lower, right, turn, staging_1, True, True, ADD, GROUP, PROGRAMS)),
            (fetch_tiles, (dy, x, index, stride, width, slots, upper, lower, right, GATHER, GROUP, PROGRAMS)),
        ], [4, 4], [216, 72])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply_tiles, (out, slots, upper, right, turn, staging_0, False, False, ADD, GROUP, PROGRAMS)),
            (multiply_tiles, (out, slots, lower, right, turn, staging_1, True, False, ADD, GROUP, PROGRAMS)),
            (load_tiles, (dy, x, slots, upper, lower, right, GROUP, PROGRAMS)),
        ], [4, 1], [240, 24])  # fmt: skip
