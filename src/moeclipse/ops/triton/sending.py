"""What each choice of a token means for those who send it: its rank's row, its address there, its key.

compare_choices   first_TK    the rank, where no earlier choice of the token goes there, too; else -1
                  lead_TK     (that first choice) * 256 + (the token's choices there with smaller slots)
address_pairs     lead_TK     becomes row * K + j; the row is that of the first choice
keys_of_pairs     key_TK      by which pairs are sorted: (rank, chunk of the row, slot)
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def compare_choices(
    slots, rank_of_slot, first, lead, T, K: tl.constexpr, K_PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """slots [[3, 0, 2]], slots 2 and 3 on rank 1: first [[1, 0, -1]], lead [[1, 256, 0]]."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K_PADDED)
    inside = (t < T)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    mine = tl.load(slots + at, mask=inside, other=-1).to(tl.int32)
    rank = tl.load(rank_of_slot + mine, mask=mine >= 0, other=-1).to(tl.int32)
    earlier = tl.zeros((BLOCK, K_PADDED), dtype=tl.int32)
    smaller = tl.zeros((BLOCK, K_PADDED), dtype=tl.int32)
    leader = tl.zeros((BLOCK, K_PADDED), dtype=tl.int32) + K
    for other in range(K):
        slot = tl.load(slots + t * K + other, mask=t < T, other=-1).to(tl.int32)
        there = tl.load(rank_of_slot + slot, mask=slot >= 0, other=-2).to(tl.int32)
        together = rank == there[:, None]
        earlier += (together & (k[None, :] > other)).to(tl.int32)
        smaller += (together & (slot[:, None] < mine)).to(tl.int32)
        leader = tl.where(together & (leader == K), other, leader)
    tl.store(first + at, tl.where((mine >= 0) & (earlier == 0), rank, -1), mask=inside)
    tl.store(lead + at, tl.where(mine >= 0, leader * 256 + smaller, -1), mask=inside)


@triton.jit(do_not_specialize=["T"])
def address_pairs(
    slots, rank_of_slot, token_row, offsets_P1, lead, T,
    K: tl.constexpr, K_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place. Rows of rank 1 begin at 5, the token's is 7, lead 1 * 256 + 2, K = 4: address 2 * 4 + 2."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K_PADDED)
    at = t[:, None] * K + k[None, :]
    inside = (t < T)[:, None] & (k < K)[None, :]
    told = tl.load(lead + at, mask=inside, other=-1)
    used = told >= 0
    slot = tl.load(slots + at, mask=used, other=0).to(tl.int32)
    rank = tl.load(rank_of_slot + slot, mask=used, other=0).to(tl.int32)
    row = tl.load(token_row + t[:, None] * K + told // 256, mask=used, other=0)
    row -= tl.load(offsets_P1 + rank, mask=used, other=0)
    tl.store(lead + at, tl.where(used, row * K + told % 256, -1), mask=inside)


@triton.jit(do_not_specialize=["N", "chunks"])
def keys_of_pairs(
    slots, address, rank_of_slot, first_slot, rows_P, cuts_P, key, N, chunks,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank 1 has slots 2 to 4, its 5 rows are cut in two, 3 + 2: row 3 for slot 4 has key 2 * 2 + 3 + 2."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < N, other=-1).to(tl.int32)
    used = slot >= 0
    rank = tl.load(rank_of_slot + slot, mask=used, other=0).to(tl.int32)
    first = tl.load(first_slot + rank, mask=used, other=0).to(tl.int32)
    width = tl.load(first_slot + rank + 1, mask=used, other=0).to(tl.int32) - first
    row = tl.load(address + at, mask=used, other=0) // K
    total = tl.load(rows_P + rank, mask=used, other=0).to(tl.int32)
    cuts = tl.load(cuts_P + rank, mask=used, other=1).to(tl.int32)
    share = total // cuts
    more = total - share * cuts
    larger = more * (share + 1)
    # What is negative is not taken: both sides are computed everywhere.
    beyond = tl.maximum(row - larger, 0) // tl.maximum(share, 1) + more
    chunk = tl.where(row < larger, row // (share + 1), beyond)
    tl.store(key + at, tl.where(used, first * chunks + chunk * width + slot - first, -1), mask=at < N)
