"""All-reduce in one kernel over buffers that peers can read; see `comm/peer_cuda` for the protocol.

Every buffer begins with flags: FLAGS 32-bit words for each block, one per rank. Block b of a rank posts the
number of the round into word `rank` of line b of every peer and polls its own line, so a block waits for its
peers' block b and never for a whole grid: nothing hangs when blocks do not all run at once.

Work is dealt so that block b copies in, reduces and gathers the same elements of every part. Then whatever a
block reads from a peer was written by that peer's block b, which is the one it waited for.
The numbers of the rounds live on the device, so a captured graph replays correctly.
"""
# mypy: disable-error-code="no-untyped-def"
# (Triton compiles these functions; their arguments have Triton's types.)

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

FLAGS = tl.constexpr(16)
LOOK = tl.constexpr(256)  # polls between two looks at the clock


@triton.jit
def post_and_wait(table, status, clock, block, number, limit_ns, RANK: tl.constexpr, W: tl.constexpr):
    """Publish what this block wrote and wait for the same block of all peers, at most `limit_ns`.

    All threads must leave the loop together, so the time, which each thread would read for itself, goes
    through an atomic: one thread writes it, and all of them get what was there before.
    """
    tl.debug_barrier()
    lane = tl.arange(0, FLAGS)  # one thread for each peer
    to = (lane < W) & (lane != RANK)
    flags = tl.load(table + lane, mask=to, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + block * FLAGS + RANK, number, mask=to, sem="release", scope="sys")
    mine = tl.load(table + RANK).to(tl.pointer_type(tl.int32)) + block * FLAGS
    for peer in tl.static_range(W):
        if peer != RANK:
            seen = tl.atomic_add(mine + peer, 0, sem="acquire", scope="sys")
            polls = 0
            first = tl.full((), 0, tl.int64)
            while (seen - number < 0) & (polls >= 0):
                seen = tl.atomic_add(mine + peer, 0, sem="acquire", scope="sys")
                polls += 1
                if polls % LOOK == 0:
                    last = tl.atomic_xchg(clock + block, globaltimer(), sem="relaxed", scope="gpu")
                    if polls == 2 * LOOK:
                        first = last
                    if (polls > 2 * LOOK) & (last - first > limit_ns):
                        polls = -1
            if seen - number < 0:
                tl.store(status, peer + 1)
    tl.debug_barrier()


@triton.jit
def count_rounds(counts, block, grid, number, MAX_BLOCKS: tl.constexpr):
    """All lines stay at the same number, those of blocks that this launch did not need included."""
    for line in range(block, MAX_BLOCKS, grid):
        tl.store(counts + line, number)


@triton.jit
def area_of(table, peer, number, area_bytes, head_bytes, like):
    """The area of a rank for this round, as a pointer to elements."""
    place = tl.load(table + peer) + head_bytes + (number & 1).to(tl.int64) * area_bytes
    return tl.multiple_of(place.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def copy_part(source, target, start, stop, to, block, grid, BLOCK: tl.constexpr):
    """target[to : ...] = source[start:stop], the tiles of this block."""
    lane = tl.arange(0, BLOCK)
    full = (stop - start) // BLOCK
    for tile in range(block, full, grid):
        place = tile * BLOCK + lane
        tl.store(target + to + place, tl.load(source + start + place, cache_modifier=".cg"))
    if full % grid == block:
        place = full * BLOCK + lane
        inside = start + place < stop
        value = tl.load(source + start + place, mask=inside, cache_modifier=".cg")
        tl.store(target + to + place, value, mask=inside)


@triton.jit
def sum_tile(
    table, number, area_bytes, head_bytes, like, place, inside, W: tl.constexpr, MASKED: tl.constexpr
):
    total = tl.zeros(place.shape, dtype=tl.float32)
    for peer in tl.static_range(W):
        shown = area_of(table, peer, number, area_bytes, head_bytes, like)
        if MASKED:
            value = tl.load(shown + place, mask=inside, other=0.0, cache_modifier=".cg")
        else:
            value = tl.load(shown + place, cache_modifier=".cg")
        total += value.to(tl.float32)
    return total


@triton.jit
def sum_part(
    table, number, area_bytes, head_bytes, target, start, stop, to, block, grid,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target[to : ...] = sum over ranks, in rank order, of the elements start:stop that they show."""
    lane = tl.arange(0, BLOCK)
    full = (stop - start) // BLOCK
    for tile in range(block, full, grid):
        place = tile * BLOCK + lane
        total = sum_tile(table, number, area_bytes, head_bytes, target, start + place, place >= 0, W, False)
        tl.store(target + to + place, total.to(target.dtype.element_ty))
    if full % grid == block:
        place = full * BLOCK + lane
        inside = start + place < stop
        total = sum_tile(table, number, area_bytes, head_bytes, target, start + place, inside, W, True)
        tl.store(target + to + place, total.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def all_reduce(
    x, out, table, counts, status, clock, length, part, area_bytes, head_bytes, limit_ns,
    RANK: tl.constexpr, W: tl.constexpr, TWO: tl.constexpr, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """out = sum over ranks of x. The last part, of rank W - 1, takes the remainder."""
    block, grid = tl.program_id(0), tl.num_programs(0)
    number = tl.load(counts + block) + 1
    mine = area_of(table, RANK, number, area_bytes, head_bytes, x)
    if TWO:
        for peer in tl.static_range(W):
            stop = length if peer == W - 1 else (peer + 1) * part
            copy_part(x, mine, peer * part, stop, peer * part, block, grid, BLOCK)
        post_and_wait(table, status, clock, block, number, limit_ns, RANK, W)
        stop = length if RANK == W - 1 else (RANK + 1) * part
        reduced = area_of(table, RANK, number + 1, area_bytes, head_bytes, x)
        sum_part(
            table,
            number,
            area_bytes,
            head_bytes,
            reduced,
            RANK * part,
            stop,
            RANK * part,
            block,
            grid,
            W,
            BLOCK,
        )
        number += 1
        post_and_wait(table, status, clock, block, number, limit_ns, RANK, W)
        for step in tl.static_range(W):
            peer = (RANK + step) % W
            stop = length if peer == W - 1 else (peer + 1) * part
            shown = area_of(table, peer, number, area_bytes, head_bytes, x)
            copy_part(shown, out, peer * part, stop, peer * part, block, grid, BLOCK)
    else:
        copy_part(x, mine, 0, length, 0, block, grid, BLOCK)
        post_and_wait(table, status, clock, block, number, limit_ns, RANK, W)
        sum_part(table, number, area_bytes, head_bytes, out, 0, length, 0, block, grid, W, BLOCK)
    count_rounds(counts, block, grid, number, MAX_BLOCKS)


@triton.jit
def all_reduce_rms_norm(
    x, residual, weight, normed, h, table, counts, status, clock, T, D, eps, area_bytes, head_bytes, limit_ns,
    RANK: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """h = round(sum over ranks of x + residual), normed = h / rms(h) * weight; a row at a time, one stage."""
    block, grid = tl.program_id(0), tl.num_programs(0)
    number = tl.load(counts + block) + 1
    column = tl.arange(0, BLOCK)
    inside = column < D
    mine = area_of(table, RANK, number, area_bytes, head_bytes, x)
    for row in range(block, T, grid):
        place = row * D + column
        tl.store(mine + place, tl.load(x + place, mask=inside), mask=inside)
    post_and_wait(table, status, clock, block, number, limit_ns, RANK, W)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for row in range(block, T, grid):
        place = row * D + column
        total = sum_tile(table, number, area_bytes, head_bytes, x, place, inside, W, True)
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(h.dtype.element_ty)
        tl.store(h + place, rounded, mask=inside)
        wide = rounded.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
        tl.store(normed + place, (wide * inverse * scale).to(normed.dtype.element_ty), mask=inside)
    count_rounds(counts, block, grid, number, MAX_BLOCKS)
