"""Where every (token, choice) pair goes when pairs are grouped by expert: a counting sort on the device.

    count_block    counts_EB    how many pairs of block b want expert e
    scan_experts   bases_EB     how many pairs before block b want expert e; totals are the counts
    tile_table     offsets_E1, the row tiles of the matrix kernels, and how many there are
    place_block    row of each pair = offset of its expert + base of its block + rank inside the block

Four launches, no comparison sort, no atomics, and the host learns nothing. Pairs keep their order inside an
expert. A pair of -1 has no row. Where pairs are few, `group_few` does all of it in one.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def count_block(
    ids, counts_EB, row_place, row_token, num_pairs, num_experts, num_blocks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Block 0 of ids [2, 0, 2, -1]: counts 1, 0, 2 for experts 0, 1, 2. Rows that stay unused hold zeros."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.zeros((BLOCK,), dtype=tl.int32)
    tl.store(row_place + pair, nothing, mask=pair < num_pairs)
    tl.store(row_token + pair, nothing, mask=pair < num_pairs)
    wanted = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    for first in range(0, num_experts, CHUNK):
        expert = first + tl.arange(0, CHUNK)
        count = tl.sum((wanted[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(counts_EB + expert * num_blocks + block, count, mask=expert < num_experts)


@triton.jit
def scan_experts(counts_EB, counts_E, num_blocks, BLOCK: tl.constexpr):
    """In place, one program for each expert: counts 1, 4, 2 become bases 0, 1, 5 and the total 7."""
    expert = tl.program_id(0)
    total = 0
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        inside = block < num_blocks
        count = tl.load(counts_EB + expert * num_blocks + block, mask=inside, other=0)
        tl.store(counts_EB + expert * num_blocks + block, total + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(counts_E + expert, total)


@triton.jit(do_not_specialize=["capacity"])  # other rows arrive in every call
def tile_table(
    counts_E, offsets_E1, tiles, num_tiles, capacity, num_experts,
    BM: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program for each expert writes its row tiles: (expert, first row, end of the expert's rows).

    Counts 130, 0, 40, BM = 128: tiles (0, 0, 130), (0, 128, 130), (2, 130, 170), offsets 0, 130, 130, 170.
    """
    expert = tl.program_id(0)
    all_experts = tl.arange(0, PADDED)
    counts = tl.load(counts_E + all_experts, mask=all_experts < num_experts, other=0).to(tl.int32)
    before = all_experts < expert
    begin = tl.sum(tl.where(before, counts, 0), 0)
    first_tile = tl.sum(tl.where(before, (counts + BM - 1) // BM, 0), 0)
    count = tl.sum(tl.where(all_experts == expert, counts, 0), 0)
    num = (count + BM - 1) // BM
    tl.store(offsets_E1 + expert, begin)
    if expert == num_experts - 1:
        tl.store(offsets_E1 + num_experts, begin + count)
        tl.store(num_tiles, first_tile + num)
    for first in range(0, num, CHUNK):
        m = first + tl.arange(0, CHUNK)
        place = tiles + first_tile + m
        inside = m < num
        tl.store(place, tl.zeros_like(m) + expert, mask=inside)
        tl.store(place + capacity, begin + m * BM, mask=inside)
        tl.store(place + 2 * capacity, tl.zeros_like(m) + begin + count, mask=inside)


@triton.jit
def place_block(
    ids, bases_EB, offsets_E1, place_row, row_place, row_token, num_pairs, num_blocks,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids [2, 0, 2, -1], one block, offsets 0, 1, 1: pairs go to rows 1, 0, 2 and nowhere."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    pair = block * BLOCK + lane
    inside = pair < num_pairs
    wanted = tl.load(ids + pair, mask=inside, other=-1).to(tl.int32)
    # The same ids, lying along the other axis.
    others = tl.load(ids + block * BLOCK + lane, mask=inside, other=-1).to(tl.int32)
    earlier = (wanted[:, None] == others[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    used = wanted >= 0
    base = tl.load(bases_EB + wanted * num_blocks + block, mask=used, other=0)
    offset = tl.load(offsets_E1 + wanted, mask=used, other=0)
    row = offset + base + rank
    tl.store(place_row + pair, tl.where(used, row, -1), mask=inside)
    tl.store(row_place + row, pair, mask=used)
    tl.store(row_token + row, pair // K, mask=used)


@triton.jit(do_not_specialize=["capacity"])
def group_few(
    ids, counts_E, offsets_E1, tiles, num_tiles, place_row, row_place, row_token, num_pairs, capacity,
    num_experts, K: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program compares each pair with each; the first pair of a row tile writes it.

    ids [2, 0, 2, -1]: rows 1, 0, 2, none; tiles (0, 0, 1), (2, 1, 3).
    """
    lane = tl.arange(0, BLOCK)
    wanted = tl.load(ids + lane, mask=lane < num_pairs, other=-1).to(tl.int32)
    # The same ids, lying along the other axis.
    others = tl.load(ids + lane[None, :], mask=lane[None, :] < num_pairs, other=-1).to(tl.int32)
    used = wanted >= 0
    equal = (wanted[:, None] == others).to(tl.int32)
    rank = tl.sum(equal * (lane[None, :] < lane[:, None]).to(tl.int32), axis=1)
    smaller = ((others >= 0) & (others < wanted[:, None])).to(tl.int32)
    begin = tl.sum(smaller, axis=1)
    row = begin + rank
    total = tl.sum(used.to(tl.int32), axis=0)
    tl.store(place_row + lane, tl.where(used, row, -1), mask=lane < num_pairs)
    tl.store(row_place + row, lane, mask=used)
    tl.store(row_token + row, lane // K, mask=used)
    nothing = tl.zeros((BLOCK,), dtype=tl.int32)
    unused = (lane >= total) & (lane < num_pairs)
    tl.store(row_place + lane, nothing, mask=unused)
    tl.store(row_token + lane, nothing, mask=unused)
    number = rank // BM
    tile_count = 0
    for first in range(0, num_experts, CHUNK):
        expert = first + tl.arange(0, CHUNK)
        count = tl.sum((wanted[:, None] == expert[None, :]).to(tl.int32), axis=0)
        before = tl.sum((used[:, None] & (wanted[:, None] < expert[None, :])).to(tl.int32), axis=0)
        inside = expert < num_experts
        tl.store(counts_E + expert, count, mask=inside)
        tl.store(offsets_E1 + expert, before, mask=inside)
        filled = tl.where(inside, (count + BM - 1) // BM, 0)
        # Of the tiles of this chunk, those of smaller experts.
        number += tl.sum(filled[None, :] * (expert[None, :] < wanted[:, None]).to(tl.int32), axis=1)
        tile_count += tl.sum(filled, axis=0)
    tl.store(offsets_E1 + num_experts, total)
    tl.store(num_tiles, tile_count)
    writes = used & (rank % BM == 0)
    tl.store(tiles + number, wanted, mask=writes)
    tl.store(tiles + capacity + number, row, mask=writes)
    tl.store(tiles + 2 * capacity + number, begin + tl.sum(equal, axis=1), mask=writes)
