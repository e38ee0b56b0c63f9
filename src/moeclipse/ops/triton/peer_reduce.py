"""All-reduce in one kernel over buffers that peers can read; see `comm/reduce/on_device` for the protocol.

Every buffer begins with flags: LINE 64-bit words for each block, one per rank. Block b of a rank posts the
number of the round into word `rank` of line b of every peer and polls its own line, so a block waits for its
peers' block b and never for a whole grid: nothing hangs when blocks do not all run at once. The upper half of
a word says `what` is being called: ranks that call different things are told, for nothing.

Work is dealt so that block b copies in, reduces and gathers the same elements of every part. Then whatever a
block reads from a peer was written by that peer's block b, which is the one it waited for.
The numbers of the rounds live on the device, so a captured graph replays correctly.

Inputs are read where they lie, if every rank's address of them is known (`inputs`, a row of P addresses), or
else copied to the shared area first. Read in place, an input may be overwritten only when all peers have read
it: in one stage that takes a second round, in two stages the second round is there anyway.
"""
# mypy: disable-error-code="no-untyped-def, assignment"
# (Triton compiles these functions; their arguments have Triton's types.)

import triton
import triton.language as tl

ONE, TWO, SCATTER, GATHER = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
LANES = tl.constexpr(32)  # one for each thread of a warp: all threads of a warp leave a loop together
LINE = tl.constexpr(16)
MOST_BLOCKS = tl.constexpr(64)
TAIL = tl.constexpr(2048)
"""Elements at a time of what is left behind the last whole tile. Masked elements are loaded one by one: a
whole tile of them would need more registers than there are, in a loop that mostly does not run."""
LOOK = tl.constexpr(256)  # polls between two looks at the clock
NOT_REGISTERED = tl.constexpr(1000)
OTHER_CALL = tl.constexpr(100)  # and 1 + the peer that made another one


@triton.jit
def poll(flags):
    """Each thread reads a flag, and sees whatever its writer wrote before it."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", [flags], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def clock(lane):
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def look(watched, to, number, what):
    """For each peer: 2 if it has not come to this round, 1 if it came with another call, 0 if all is well.
    One that is further already has compared calls itself, when this rank had just posted this round."""
    seen = poll(watched)
    behind = seen.to(tl.int32) - number
    other = (behind == 0) & ((seen >> 32).to(tl.int32) != what)
    return tl.where(to, tl.where(behind < 0, 2, tl.where(other, 1, 0)), 0)


@triton.jit
def post_and_wait(table, status, block, number, what, limit_us, rank, W: tl.constexpr):
    """Publish what this block wrote and wait for the same block of all peers, at most `limit_us`.

    Every warp polls for itself: a thread watches one peer, and the most of what a warp sees decides for all
    of its threads. Nothing in the loop makes warps wait for each other, so they may leave it one by one.
    """
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    to = (lane < W) & (lane != rank)
    theirs = tl.load(table + lane, mask=to, other=0).to(tl.pointer_type(tl.int64))
    word = (what.to(tl.int64) << 32) | (number.to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(theirs + block * LINE + rank, word, mask=to, sem="release", scope="sys")
    mine = tl.load(table + rank).to(tl.pointer_type(tl.int64)) + block * LINE
    watched = mine + tl.where(to, lane, rank)
    wrong = look(watched, to, number, what)
    most = tl.max(wrong, axis=0)
    polls = 0
    begun = tl.full((), 0, tl.int64)
    while (most == 2) & (polls >= 0):
        wrong = look(watched, to, number, what)
        most = tl.max(wrong, axis=0)
        polls += 1
        if polls % LOOK == 0:
            now = tl.min(clock(lane), axis=0)
            begun = tl.where(polls == LOOK, now, begun)
            polls = tl.where(now - begun > limit_us.to(tl.int64) * 1000, -1, polls)
    if most != 0:
        code = tl.max(tl.where(wrong == most, lane + 1, 0), axis=0)
        if tl.load(status, volatile=True) == 0:  # the first error is the cause
            tl.store(status, tl.where(most == 1, OTHER_CALL, 0) + code)
    tl.debug_barrier()


@triton.jit
def count_rounds(counts, block, grid, number, max_blocks):
    """All lines stay at the same number, those of blocks that this launch did not need included."""
    line = block + tl.arange(0, MOST_BLOCKS) * grid
    tl.store(counts + line, number, mask=line < max_blocks)


@triton.jit
def area_of(table, peer, number, area_bytes, head_bytes, like):
    """The area of a rank for this round, as a pointer to elements."""
    place = tl.load(table + peer) + head_bytes + (number & 1).to(tl.int64) * area_bytes
    return tl.multiple_of(place.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def input_of(inputs, peer, like):
    """A rank's input where it lies; registered ones begin on whole vectors."""
    return tl.multiple_of(tl.load(inputs + peer).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def copy_part(source, target, start, stop, block, grid, BLOCK: tl.constexpr):
    """target[start:stop] = source[start:stop], the tiles of this block."""
    lane = tl.arange(0, BLOCK)
    full = (stop - start) // BLOCK
    for tile in range(block, full, grid):
        place = start + tile * BLOCK + lane
        tl.store(target + place, tl.load(source + place, cache_modifier=".cg"))
    tail = tl.arange(0, TAIL)
    for piece in range(block, tl.cdiv(stop - start - full * BLOCK, TAIL), grid):
        place = start + full * BLOCK + piece * TAIL + tail
        inside = place < stop
        tl.store(target + place, tl.load(source + place, mask=inside, cache_modifier=".cg"), mask=inside)


@triton.jit
def own_or_area_of(x, rank, table, peer, number, area_bytes, head_bytes):
    """A peer's area, but this rank's own input where it lies, on whole vectors."""
    area = tl.load(table + peer) + head_bytes + (number & 1).to(tl.int64) * area_bytes
    place = tl.where(peer == rank, x.to(tl.int64), area)
    return tl.multiple_of(place.to(tl.pointer_type(x.dtype.element_ty)), 16)


@triton.jit
def load_shown(
    x, rank, table, inputs, peer: tl.constexpr, number, area_bytes, head_bytes, place, inside,
    IN_PLACE: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a rank shows. OWN: this rank's input is read where it lies."""
    if IN_PLACE:
        shown = input_of(inputs, peer, x)
    elif OWN:
        shown = own_or_area_of(x, rank, table, peer, number, area_bytes, head_bytes)
    else:
        shown = area_of(table, peer, number, area_bytes, head_bytes, x)
    if MASKED:
        return tl.load(shown + place, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.load(shown + place, cache_modifier=".cg")


@triton.jit
def sum_tile(
    x, rank, table, inputs, number, area_bytes, head_bytes, place, inside,
    W: tl.constexpr, IN_PLACE: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sum over ranks in order, with all loads under way at once.

    Left alone the assembler saves registers: it adds what has come before it loads the rest. No load crosses
    a barrier, and nothing can be added before rank 0's is there, so that one is loaded behind it. Two loads
    are under way together anyway.
    """
    values = ()
    for peer in tl.static_range(1, W):
        value = load_shown(
            x, rank, table, inputs, peer, number, area_bytes, head_bytes, place, inside, IN_PLACE, OWN, MASKED
        )
        values += (value,)
    if W > 2:
        tl.debug_barrier()
    first = load_shown(
        x, rank, table, inputs, 0, number, area_bytes, head_bytes, place, inside, IN_PLACE, OWN, MASKED
    )
    total = first.to(tl.float32)
    for peer in tl.static_range(1, W):
        total += values[peer - 1].to(tl.float32)
    return total


@triton.jit
def sum_part(
    x, rank, table, inputs, number, area_bytes, head_bytes, target, copy, start, stop, block, grid,
    W: tl.constexpr, IN_PLACE: tl.constexpr, OWN: tl.constexpr, TWICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target[start:stop], and with TWICE copy[start:stop], = sum over ranks, in order, of what they show."""
    lane = tl.arange(0, BLOCK)
    full = (stop - start) // BLOCK
    for tile in range(block, full, grid):
        place = start + tile * BLOCK + lane
        total = sum_tile(
            x, rank, table, inputs, number, area_bytes, head_bytes, place, place >= 0, W, IN_PLACE, OWN, False
        ).to(target.dtype.element_ty)
        tl.store(target + place, total)
        if TWICE:
            tl.store(copy + place, total)
    tail = tl.arange(0, TAIL)
    for piece in range(block, tl.cdiv(stop - start - full * BLOCK, TAIL), grid):
        place = start + full * BLOCK + piece * TAIL + tail
        inside = place < stop
        total = sum_tile(
            x, rank, table, inputs, number, area_bytes, head_bytes, place, inside, W, IN_PLACE, OWN, True
        ).to(target.dtype.element_ty)
        tl.store(target + place, total, mask=inside)
        if TWICE:
            tl.store(copy + place, total, mask=inside)


@triton.jit
def part_end(peer, part, length, W: tl.constexpr):
    """The last part, of rank W - 1, takes the remainder."""
    return tl.where(peer == W - 1, length, (peer + 1) * part)


@triton.jit
def reduce_in_one(
    x, out, inputs, table, status, number, what, length, area_bytes, head_bytes, limit_us, rank, block, grid,
    W: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if not IN_PLACE:
        mine = area_of(table, rank, number, area_bytes, head_bytes, x)
        copy_part(x, mine, 0, length, block, grid, BLOCK)
    post_and_wait(table, status, block, number, what, limit_us, rank, W)
    sum_part(
        x, rank, table, inputs, number, area_bytes, head_bytes, out, out, 0, length, block, grid,
        W, IN_PLACE, False, False, BLOCK,
    )  # fmt: skip
    if IN_PLACE:
        number += 1
        post_and_wait(table, status, block, number, what, limit_us, rank, W)
    return number


@triton.jit
def scatter(
    x, target, copy, inputs, table, status, number, what, length, part, area_bytes, head_bytes, limit_us,
    rank, block, grid, W: tl.constexpr, IN_PLACE: tl.constexpr, OWN: tl.constexpr, TWICE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """target[this rank's part] = the sum over ranks of that part. OWN: nobody else reads this rank's part of
    its input, so it is not copied."""
    if not IN_PLACE:
        mine = area_of(table, rank, number, area_bytes, head_bytes, x)
        # Not unrolled: a kernel runs through most of its code once, and fetching that takes its time.
        for step in range(1 if OWN else 0, W):
            peer = (rank + step) % W
            copy_part(x, mine, peer * part, part_end(peer, part, length, W), block, grid, BLOCK)
    post_and_wait(table, status, block, number, what, limit_us, rank, W)
    stop = part_end(rank, part, length, W)
    sum_part(
        x, rank, table, inputs, number, area_bytes, head_bytes, target, copy, rank * part, stop, block, grid,
        W, IN_PLACE, OWN, TWICE, BLOCK,
    )  # fmt: skip


@triton.jit
def collect(
    out, table, status, number, what, length, part, area_bytes, head_bytes, limit_us, rank, block, grid,
    W: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """out = the parts that all ranks show in this round, from this rank's own on; FIRST 1: it is there."""
    post_and_wait(table, status, block, number, what, limit_us, rank, W)
    for step in range(FIRST, W):
        peer = (rank + step) % W
        shown = area_of(table, peer, number, area_bytes, head_bytes, out)
        copy_part(shown, out, peer * part, part_end(peer, part, length, W), block, grid, BLOCK)


@triton.jit(
    do_not_specialize=["length", "part", "what", "area_bytes", "head_bytes", "limit_us", "rank", "max_blocks"]
)
def all_reduce(
    x, out, inputs, table, counts, status,
    length, part, what, area_bytes, head_bytes, limit_us, rank, max_blocks,
    W: tl.constexpr, KIND: tl.constexpr, IN_PLACE: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sum over ranks of x, in one stage or two; or one of the two stages: this rank's part of the sum,
    or all ranks' parts together. `part` is a multiple of 16 elements. OWN: x begins on a whole vector."""
    block, grid = tl.program_id(0), tl.num_programs(0)
    number = tl.load(counts + block) + 1
    part = part // 16 * 16  # tells the compiler that parts begin on whole vectors
    ready = tl.full((), 1, tl.int64)
    if IN_PLACE:
        ready = tl.load(inputs)
    if ready != 0:
        if KIND == ONE:
            number = reduce_in_one(
                x, out, inputs, table, status, number, what, length, area_bytes, head_bytes, limit_us,
                rank, block, grid, W, IN_PLACE, BLOCK,
            )  # fmt: skip
        elif KIND == GATHER:
            mine = area_of(table, rank, number, area_bytes, head_bytes, x)
            stop = part_end(rank, part, length, W)
            copy_part(x - rank * part, mine, rank * part, stop, block, grid, BLOCK)
        else:
            reduced = out - rank * part
            if KIND == TWO:
                reduced = area_of(table, rank, number + 1, area_bytes, head_bytes, x)
            scatter(
                x, reduced, out, inputs, table, status, number, what, length, part, area_bytes, head_bytes,
                limit_us, rank, block, grid, W, IN_PLACE, OWN, KIND == TWO, BLOCK,
            )  # fmt: skip
            if KIND == TWO:
                number += 1
        if (KIND == TWO) | (KIND == GATHER):
            collect(
                out, table, status, number, what, length, part, area_bytes, head_bytes, limit_us,
                rank, block, grid, W, BLOCK, 1 if KIND == TWO else 0,
            )  # fmt: skip
        count_rounds(counts, block, grid, number, max_blocks)
    else:
        tl.store(status, NOT_REGISTERED)


@triton.jit(do_not_specialize=["what", "limit_us", "rank", "max_blocks", "area_bytes", "head_bytes"])
def all_reduce_rms_norm(
    x, residual, weight, normed, h, table, counts, status, T, D, eps,
    what, area_bytes, head_bytes, limit_us, rank, max_blocks,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h = round(sum over ranks of x + residual), normed = h / rms(h) * weight; a row at a time, one stage."""
    block, grid = tl.program_id(0), tl.num_programs(0)
    number = tl.load(counts + block) + 1
    column = tl.arange(0, BLOCK)
    inside = column < D
    mine = area_of(table, rank, number, area_bytes, head_bytes, x)
    for row in range(block, T, grid):
        place = row * D + column
        tl.store(mine + place, tl.load(x + place, mask=inside), mask=inside)
    post_and_wait(table, status, block, number, what, limit_us, rank, W)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for row in range(block, T, grid):
        place = row * D + column
        total = sum_tile(
            x, rank, table, table, number, area_bytes, head_bytes, place, inside, W, False, False, True
        )
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(h.dtype.element_ty)
        tl.store(h + place, rounded, mask=inside)
        wide = rounded.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
        tl.store(normed + place, (wide * inverse * scale).to(normed.dtype.element_ty), mask=inside)
    count_rounds(counts, block, grid, number, max_blocks)
