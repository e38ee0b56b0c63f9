"""Rows grouped by expert: who stands where, without asking the host.

A *pair* is one (token, choice) of `expert_ids_TK`; a pair of -1 is unused. Grouping gives every used pair a
row: expert 0's rows come first, then expert 1's, tokens ascending inside an expert.

    expert_ids_TK = [[1, 0], [0, -1]]   ->   counts 2, 1 · offsets 0, 2, 3
    rows: (token 0, expert 0), (token 1, expert 0), (token 0, expert 1)
    row_token 0, 1, 0 · row_place 1, 2, 0 · place_row [[2, 0], [1, -1]]

Contract: tables have room for T x K rows; how many are in use is `offsets_E1[-1]`, on the device. Entries
past that are zero. The matrix kernels walk over row tiles (`tiles_3C`), which are made here as well.

Hazard: nothing here may call `.item()` or `.tolist()` on the kernel path: one host copy stalls the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moeclipse.ops.launch import launch

ROW_TILE = 128
"""Rows that a matrix kernel works on at once; a wgmma warp group takes 64, and two share the weights."""
FEW_ROWS = 16
"""The same where there are no more tokens: what a block of a tensor core takes at least."""
FEW_PAIRS = 128
"""So many pairs one program groups, each compared with each."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    num_rows: int
    """Rows there is room for."""
    counts_E: torch.Tensor
    offsets_E1: torch.Tensor
    tiles_3C: torch.Tensor | None = None
    """Of each row tile: expert, first row, end of the expert's rows. Kernels only."""
    num_tiles: torch.Tensor | None = None
    tile_rows: int = ROW_TILE
    """Of a row tile, at most."""
    row_token_M: torch.Tensor | None = None
    row_place_M: torch.Tensor | None = None
    place_row_TK: torch.Tensor | None = None
    """The inverse: of each pair its row, or -1."""


def group_rows_reference(expert_ids_TK: torch.Tensor, num_experts: int) -> Grouping:
    """By sorting, in plain torch."""
    top_k = expert_ids_TK.shape[1]
    ids_M = expert_ids_TK.flatten().to(torch.int64)
    used = ids_M >= 0
    order = torch.where(used, ids_M, num_experts).argsort(stable=True).to(torch.int32)
    counts_E = torch.bincount(ids_M[used], minlength=num_experts).to(torch.int32)
    offsets = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0).to(torch.int32)])
    row = torch.arange(len(ids_M), dtype=torch.int32, device=ids_M.device)
    place_row = torch.empty_like(row)
    place_row[order.long()] = row
    in_use = row < offsets[-1]
    row_place = torch.where(in_use, order, 0)
    return Grouping(
        num_rows=len(ids_M),
        counts_E=counts_E,
        offsets_E1=offsets,
        row_token_M=row_place // top_k,
        row_place_M=row_place,
        place_row_TK=torch.where(used, place_row, -1).view(expert_ids_TK.shape),
    )


def group_rows(expert_ids_TK: torch.Tensor, num_experts: int) -> Grouping:
    """The grouping of a routing; on CUDA by counting, in four small launches, or one where pairs are few."""
    if expert_ids_TK.is_cuda and expert_ids_TK.numel() > 0:
        few = expert_ids_TK.numel() <= FEW_PAIRS
        return (group_few_kernel if few else group_rows_kernel)(expert_ids_TK, num_experts)
    return group_rows_reference(expert_ids_TK, num_experts)


def group_counts(counts_E: torch.Tensor, num_rows: int) -> Grouping:
    """The grouping of rows that arrived in expert order: the first counts[0] are expert 0's, and so on."""
    if counts_E.is_cuda and num_rows > 0:
        return group_counts_kernel(counts_E, num_rows)
    counts_E = counts_E.to(torch.int32)
    offsets = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0).to(torch.int32)])
    return Grouping(num_rows=num_rows, counts_E=counts_E, offsets_E1=offsets)


def group_arrived(index_M: torch.Tensor, counts: Sequence[int], num_rows: int, most: int) -> Grouping:
    """The grouping of pairs that arrived by dispatch, where a token's vector came once for several experts.

    Pairs are in expert order, `index_M` names the row of each, and no row has more than `most` of them.
    index 0, 1, 0 with counts 2, 1: places [[0, 2], [1, -1]].
    """
    grouping = group_counts(torch.tensor(list(counts), device=index_M.device), len(index_M))
    pair_M = torch.arange(len(index_M), dtype=torch.int32, device=index_M.device)
    places_RK = torch.full((num_rows, most), -1, dtype=torch.int32, device=index_M.device)
    places_RK[index_M, rank_among_equals(index_M)] = pair_M
    return replace(grouping, row_token_M=index_M.to(torch.int32), place_row_TK=places_RK)


def rank_among_equals(ids_M: torch.Tensor) -> torch.Tensor:
    """For each element, how many equal ones stand before it."""
    order = ids_M.argsort(stable=True)
    sorted_ids = ids_M[order]
    starts = torch.searchsorted(sorted_ids, sorted_ids)
    place = torch.arange(len(ids_M), device=ids_M.device) - starts
    return torch.empty_like(place).scatter_(0, order, place)


def group_rows_kernel(expert_ids_TK: torch.Tensor, num_experts: int, *, block: int = 128) -> Grouping:
    from moeclipse.ops.triton import grouping

    num_tokens, top_k = expert_ids_TK.shape
    num_pairs = num_tokens * top_k
    ids = expert_ids_TK.contiguous()
    num_blocks = -(-num_pairs // block)
    counts_EB = torch.empty(num_experts, num_blocks, dtype=torch.int32, device=ids.device)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    chunk = min(64, _power_of_two(num_experts))
    row_place = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    row_token = torch.empty_like(row_place)
    launch(
        grouping.count_block, (num_blocks,),
        ids, counts_EB, row_place, row_token, num_pairs, num_experts, num_blocks, BLOCK=block, CHUNK=chunk,
    )  # fmt: skip
    scan = min(1024, _power_of_two(num_blocks))
    launch(grouping.scan_experts, (num_experts,), counts_EB, counts_E, num_blocks, BLOCK=scan)
    plain = group_counts_kernel(counts_E, num_pairs)
    place_row = torch.empty(num_tokens, top_k, dtype=torch.int32, device=ids.device)
    launch(
        grouping.place_block, (num_blocks,),
        ids, counts_EB, plain.offsets_E1, place_row, row_place, row_token, num_pairs, num_blocks,
        K=top_k, BLOCK=block,
    )  # fmt: skip
    return Grouping(
        num_rows=num_pairs,
        counts_E=counts_E,
        offsets_E1=plain.offsets_E1,
        tiles_3C=plain.tiles_3C,
        num_tiles=plain.num_tiles,
        row_token_M=row_token,
        row_place_M=row_place,
        place_row_TK=place_row,
    )


def group_few_kernel(expert_ids_TK: torch.Tensor, num_experts: int) -> Grouping:
    """The same of at most FEW_PAIRS pairs, in one launch."""
    from moeclipse.ops.triton import grouping

    (num_tokens, top_k), device = expert_ids_TK.shape, expert_ids_TK.device
    num_pairs, tile_rows = expert_ids_TK.numel(), FEW_ROWS if num_tokens <= FEW_ROWS else ROW_TILE
    capacity = tile_capacity(num_pairs, num_experts, tile_rows)
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts_E, offsets = torch.empty(num_experts, **numbers), torch.empty(num_experts + 1, **numbers)
    tiles, num_tiles = torch.empty(3, capacity, **numbers), torch.empty(1, **numbers)
    row_place, row_token = torch.empty(num_pairs, **numbers), torch.empty(num_pairs, **numbers)
    place_row = torch.empty(num_tokens, top_k, **numbers)
    launch(
        grouping.group_few, (1,),
        expert_ids_TK.contiguous(), counts_E, offsets, tiles, num_tiles, place_row, row_place, row_token,
        num_pairs, capacity, num_experts,
        K=top_k, BM=tile_rows, BLOCK=max(16, _power_of_two(num_pairs)),
        CHUNK=min(64, _power_of_two(num_experts)),
    )  # fmt: skip
    return Grouping(
        num_rows=num_pairs,
        tile_rows=tile_rows,
        counts_E=counts_E,
        offsets_E1=offsets,
        tiles_3C=tiles,
        num_tiles=num_tiles,
        row_token_M=row_token,
        row_place_M=row_place,
        place_row_TK=place_row,
    )


def group_counts_kernel(counts_E: torch.Tensor, num_rows: int) -> Grouping:
    from moeclipse.ops.triton import grouping

    num_experts = len(counts_E)
    capacity = tile_capacity(num_rows, num_experts)
    tiles = torch.empty(3, capacity, dtype=torch.int32, device=counts_E.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=counts_E.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=counts_E.device)
    launch(
        grouping.tile_table, (num_experts,),
        counts_E, offsets, tiles, num_tiles, capacity, num_experts,
        BM=ROW_TILE, PADDED=_power_of_two(num_experts), CHUNK=64,
    )  # fmt: skip
    return Grouping(
        num_rows=num_rows,
        counts_E=counts_E,
        offsets_E1=offsets,
        tiles_3C=tiles,
        num_tiles=num_tiles,
    )


def tile_capacity(num_rows: int, num_experts: int, tile_rows: int = ROW_TILE) -> int:
    """Row tiles there is room for: each expert may leave one partly filled, and has a row in it."""
    return min(-(-num_rows // tile_rows) + num_experts, num_rows)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
