"""Who sends what to whom: tables of a rank's pairs and rows, from the slots that its tokens chose.

A *pair* is one (token, choice), and goes to a slot of some rank; a *row* is a token's vector on its way to a
rank, once for all of its pairs there. Rows lie in the order (rank, token), pairs in the order (rank, chunk,
slot, token): the rows for a rank are cut into even chunks, and a pair is in the chunk of its row.

    slots [[0, 2], [1, -1], [3, 2]], slots 0, 1 on rank 0 and 2, 3 on rank 1, one chunk
    rows     0: token 0, 1 · rank 1: token 0, 2       pairs    0-0, 1-0, 0-1, 2-1, 2-0 (token-choice)

A pair travels as one number, row * K + j: `row` is counted from the first row for that rank, and the pair is
the j-th of its row by slot. So the receiver knows all pairs of a row without looking for them.

Contract: tables have room for T x K; how much is in use, the sums of `rows_P` and `pairs_S` say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeclipse.ops.grouping import group_rows_kernel, group_rows_reference

MOST_CHOICES = 16
"""Of a token: the kernels compare all choices of a token with each other."""
BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where slots are, on the device."""

    rank_of_slot: torch.Tensor
    first_slot_P1: torch.Tensor
    """Slots of rank p: first[p] to first[p + 1] - 1."""
    num_slots: int

    @property
    def num_ranks(self) -> int:
        return len(self.first_slot_P1) - 1


@dataclass(frozen=True, kw_only=True)
class RowsToSend:
    rows_P: torch.Tensor
    row_token_M: torch.Tensor
    token_row_TK: torch.Tensor
    """Of each choice that is the first of its token for its rank, the row; of others -1."""
    address_TK: torch.Tensor
    """What travels of each pair, row * K + j; -1 where there is none."""


@dataclass(frozen=True, kw_only=True)
class PairsToSend:
    pairs_S: torch.Tensor
    """For each (rank, chunk, slot)."""
    pair_place_M: torch.Tensor
    """Of each pair, its place in the flattened (token, choice) table."""
    place_pair_TK: torch.Tensor
    """The inverse: of each choice its pair, or -1."""


@dataclass(frozen=True, kw_only=True)
class Sending:
    """All that is known before sizes travel, for rows that are not cut into chunks."""

    slots_TK: torch.Tensor
    rows: RowsToSend
    pairs: PairsToSend


def fits(slots_TK: torch.Tensor) -> bool:
    return slots_TK.is_cuda and slots_TK.numel() > 0 and slots_TK.shape[1] <= MOST_CHOICES


def rows_to_send_reference(slots_TK: torch.Tensor, places: Places) -> RowsToSend:
    """`slots_TK`: the slot of each choice, -1 where there is none."""
    top_k = slots_TK.shape[1]
    used_TK = slots_TK >= 0
    ranks_TK = torch.where(used_TK, places.rank_of_slot[slots_TK.clamp(min=0).long()], -1)
    together_TKK = (ranks_TK[:, :, None] == ranks_TK[:, None, :]) & used_TK[:, None, :]
    earlier_KK = torch.ones(top_k, top_k, dtype=torch.bool, device=slots_TK.device).tril(-1)
    first_TK = used_TK & ~(together_TKK & earlier_KK).any(2)
    rows = group_rows_reference(torch.where(first_TK, ranks_TK, -1), places.num_ranks)
    assert rows.place_row_TK is not None
    assert rows.row_token_M is not None
    lead_TK = together_TKK.to(torch.int8).argmax(2)
    row_TK = rows.place_row_TK.gather(1, lead_TK) - rows.offsets_E1[ranks_TK.clamp(min=0).long()]
    place_TK = (together_TKK & (slots_TK[:, None, :] < slots_TK[:, :, None])).sum(2)
    return RowsToSend(
        rows_P=rows.counts_E,
        row_token_M=rows.row_token_M,
        token_row_TK=rows.place_row_TK,
        address_TK=torch.where(used_TK, row_TK * top_k + place_TK, -1).to(torch.int32),
    )


def rows_to_send(slots_TK: torch.Tensor, places: Places) -> RowsToSend:
    return (rows_to_send_kernel if fits(slots_TK) else rows_to_send_reference)(slots_TK, places)


def rows_to_send_kernel(slots_TK: torch.Tensor, places: Places) -> RowsToSend:
    from moeclipse.ops.triton import sending

    num_tokens, top_k = slots_TK.shape
    slots_TK = slots_TK.contiguous()
    first_TK, lead_TK = torch.empty(2, num_tokens, top_k, dtype=torch.int32, device=slots_TK.device)
    grid, sizes = (-(-num_tokens // BLOCK),), {"K": top_k, "K_PADDED": _power_of_two(top_k), "BLOCK": BLOCK}
    sending.compare_choices[grid](slots_TK, places.rank_of_slot, first_TK, lead_TK, num_tokens, **sizes)
    rows = group_rows_kernel(first_TK, places.num_ranks)
    assert rows.place_row_TK is not None
    assert rows.row_token_M is not None
    sending.address_pairs[grid](
        slots_TK, places.rank_of_slot, rows.place_row_TK, rows.offsets_E1, lead_TK, num_tokens, **sizes
    )
    return RowsToSend(
        rows_P=rows.counts_E,
        row_token_M=rows.row_token_M,
        token_row_TK=rows.place_row_TK,
        address_TK=lead_TK,
    )


def pairs_to_send_reference(
    slots_TK: torch.Tensor,
    rows: RowsToSend,
    places: Places,
    cuts_P: torch.Tensor | None = None,
    chunks: int = 1,
) -> PairsToSend:
    """`cuts_P`: how many chunks the rows for each rank are cut into, at most `chunks`; left out: one."""
    used_TK, known_TK = slots_TK >= 0, slots_TK.clamp(min=0).long()
    key_TK = known_TK
    if cuts_P is not None:
        ranks_TK = places.rank_of_slot[known_TK].long()
        row_TK = rows.address_TK // slots_TK.shape[1]
        chunk_TK = chunk_of(row_TK, rows.rows_P[ranks_TK], cuts_P[ranks_TK])
        first_TK = places.first_slot_P1[ranks_TK]
        width_TK = places.first_slot_P1[ranks_TK + 1] - first_TK
        key_TK = first_TK * chunks + chunk_TK * width_TK + (known_TK - first_TK)
    pairs = group_rows_reference(torch.where(used_TK, key_TK, -1), places.num_slots * chunks)
    assert pairs.row_place_M is not None
    assert pairs.place_row_TK is not None
    return PairsToSend(
        pairs_S=pairs.counts_E, pair_place_M=pairs.row_place_M, place_pair_TK=pairs.place_row_TK
    )


def pairs_to_send(
    slots_TK: torch.Tensor,
    rows: RowsToSend,
    places: Places,
    cuts_P: torch.Tensor | None = None,
    chunks: int = 1,
) -> PairsToSend:
    function = pairs_to_send_kernel if fits(slots_TK) else pairs_to_send_reference
    return function(slots_TK, rows, places, cuts_P, chunks)


def pairs_to_send_kernel(
    slots_TK: torch.Tensor,
    rows: RowsToSend,
    places: Places,
    cuts_P: torch.Tensor | None = None,
    chunks: int = 1,
) -> PairsToSend:
    from moeclipse.ops.triton import sending

    key_TK, (num_tokens, top_k) = slots_TK, slots_TK.shape
    if cuts_P is not None:
        slots_TK, key_TK = slots_TK.contiguous(), torch.empty_like(slots_TK, dtype=torch.int32)
        sending.keys_of_pairs[(-(-num_tokens * top_k // 1024),)](
            slots_TK, rows.address_TK, places.rank_of_slot, places.first_slot_P1, rows.rows_P, cuts_P, key_TK,
            num_tokens * top_k, chunks, K=top_k, BLOCK=1024,
        )  # fmt: skip
    pairs = group_rows_kernel(key_TK, places.num_slots * chunks)
    assert pairs.row_place_M is not None
    assert pairs.place_row_TK is not None
    return PairsToSend(
        pairs_S=pairs.counts_E, pair_place_M=pairs.row_place_M, place_pair_TK=pairs.place_row_TK
    )


def chunk_of(place: torch.Tensor, total: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """Which of `chunks` even parts of range(total) holds `place`; the cuts are those of even_bounds."""
    share = total // chunks
    larger = (total - share * chunks) * (share + 1)  # where the parts with one more end
    beyond = (place - larger) // share.clamp(min=1) + (total - share * chunks)
    return torch.where(place < larger, place // (share + 1), beyond)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
