"""Weight gradients whose warps divide the work (Hopper): out_e (+)= dy_e^T x_e over ragged groups of rows.

Three roles share a multiprocessor. One warp *loads*: it fills a ring of STAGES blocks of BK rows through the
copy engine. Two groups of four warps *multiply*: each owns half of the rows of a [BM, BN] tile and keeps its
sums in registers; both read the same block of x. Each writes its half through BUFFERS small pieces of shared
memory, filling one while the copy engine reads the others, and goes on to the next tile before the last ones
are read. The second group writes after the first: so they drift apart, and while one writes, the other has
the tensor cores for itself.

Contract: as `wgrad.grouped_wgrad` without gathered rows. Adding goes through the copy engine's reduction, one
addition for each element, so two runs give the same bits.

Hazard: BUFFERS must divide the number of pieces (BN / PIECE): buffers are taken in turn, and waiting for "all
but the last BUFFERS - 1" frees the next one only if the turn goes on unbroken from tile to tile.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
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
def load_tiles(
    dy, x, walk, upper, lower, right, full, free,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: every block of every tile of this program, as slots become free.

    Two tiles of 3 blocks, STAGES = 4: blocks 0..3 at once, block 4 when both groups are through with block 0.
    """
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
def halves(value):
    """The left and the right half of the columns."""
    BM: gl.constexpr = value.shape[0]
    BN: gl.constexpr = value.shape[1]
    return value.reshape([BM, 2, BN // 2]).permute((0, 2, 1)).split()


@gluon.jit
def write(out, expert, row, column, sums, staging, FIRST: gl.constexpr, ADD: gl.constexpr):
    """Half a tile in pieces as wide as the staging buffers, which take turns.

    64 x 256 sums, two buffers 64 x 32: eight pieces through buffers 0, 1, 0, 1, ...
    """
    WIDE: gl.constexpr = sums.shape[1]
    PIECE: gl.constexpr = staging.shape[3]
    BUFFERS: gl.constexpr = staging.shape[0]
    if WIDE == PIECE:
        tma.store_wait(pendings=BUFFERS - 1)
        piece = staging.index(FIRST % BUFFERS)
        piece.store(sums.to(out.dtype).reshape([1, sums.shape[0], WIDE]))
        fence_async_shared()
        if ADD:
            add_out(out, [expert, row, column], piece)
        else:
            copy_out(out, [expert, row, column], piece)
    else:
        left, right = halves(sums)
        write(out, expert, row, column, left, staging, FIRST, ADD)
        write(out, expert, row, column + WIDE // 2, right, staging, FIRST + WIDE // 2 // PIECE, ADD)


@gluon.jit
def multiply_tiles(
    out, walk, left, right, full, free, turn, staging, SECOND: gl.constexpr, ADD: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group's half of every tile of this program: sums over an expert's blocks, then writes.

    offsets = [0, 3, 3, 8], BK = 4: one block, none (nothing to add, or zeros to write), two blocks.
    """
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


@gluon.jit(do_not_specialize=["num_experts", "N", "D"])
def grouped_wgrad(
    dy, x, out, offsets, num_experts, N, D,
    ADD: gl.constexpr, GROUP: gl.constexpr, STAGGER: gl.constexpr, PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """dy and x are ragged descriptors of [BK, BM / 2] and [BK, BN] blocks, out one of [1, BM / 2, PIECE].

    offsets = [0, 3, 3, 8]: expert 0 sums over rows 0..2, expert 1 has none, expert 2 sums over rows 3..7.
    """
    HALF: gl.constexpr = BM // 2
    PIECE: gl.constexpr = out.block_shape[2]
    gl.static_assert(BN // PIECE % BUFFERS == 0, "staging buffers must divide the pieces of a tile")
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(128, dy.dtype.primitive_bitwidth, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    num_m = (N + BM - 1) // BM
    num_n = (D + BN - 1) // BN
    walk = (offsets, num_experts * num_m * num_n, num_m, num_n)
    right = gl.allocate_shared_memory(x.dtype, [STAGES, BK, BN], BLOCK)
    upper = gl.allocate_shared_memory(dy.dtype, [STAGES, BK, HALF], BLOCK)
    lower = gl.allocate_shared_memory(dy.dtype, [STAGES, BK, HALF], BLOCK)
    staging_0 = gl.allocate_shared_memory(out.dtype, [BUFFERS, 1, HALF, PIECE], out.layout)
    staging_1 = gl.allocate_shared_memory(out.dtype, [BUFFERS, 1, HALF, PIECE], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    mbarrier.init(turn, count=1)
    fence_async_shared()
    if STAGGER > 0:
        steps = gl.load(offsets + num_experts) // (num_experts * BK)
        stagger(steps * STAGGER * gl.program_id(0) // PROGRAMS)
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (out, walk, upper, right, full, free, turn, staging_0, False, ADD, GROUP, PROGRAMS, STAGES),
            ),
            (
                multiply_tiles,
                (out, walk, lower, right, full, free, turn, staging_1, True, ADD, GROUP, PROGRAMS, STAGES),
            ),
            (load_tiles, (dy, x, walk, upper, lower, right, full, free, GROUP, PROGRAMS, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers of a thread, of 504 for the three
    )
