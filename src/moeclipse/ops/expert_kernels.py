"""The kernels of experts, launched: operands, tiles and grids for the calls of `ops/expert_mlp`.

A tile says in which form operands are handed over: as descriptors of blocks, or as they are.

Whoever comes here has asked `expert_mlp.mlp_fits`. Nothing waits for the host, and nothing is launched for
each expert: programs read on the device which rows are whose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from moeclipse.ops import descriptors
from moeclipse.ops.activation import GATED, Activation
from moeclipse.ops.descriptors import Operand
from moeclipse.ops.grouping import FEW_ROWS, Grouping
from moeclipse.ops.launch import launch
from moeclipse.ops.tuning import Tile, delay, grid_of, tile_for

WIDEST_BLOCK = 64
"""Columns of a narrow operand that are multiplied at once."""


class More(NamedTuple):
    """A product that is added inside another one's sum."""

    rows_MR: torch.Tensor
    weight: torch.Tensor
    """[E, N, R] beside weights that are [E, N, K]; [E, R, N] beside those that are [E, K, N]."""


def up_kernel(
    x: torch.Tensor,
    up_EHD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    tile: Tile | None = None,
    *,
    activation: Activation = "swiglu",
    bias_EH: torch.Tensor | None = None,
    more: More | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from moeclipse.ops.triton import expert_forward

    if activation not in GATED:
        return _up_without_gate(x, up_EHD, grouping, index_M, tile, activation, bias_EH, more)
    D, F = x.shape[1], up_EHD.shape[1] // 2
    tile = tile or tile_of("up", more, grouping, x.device, D, F)
    rank, block = _narrow(more)
    u = b = None
    if more is not None:
        u = _rows(more.rows_MR, block, tile)
        b = _blocks(_halves(more.weight), [1, 2, tile.n, block], tile)
    h = x.new_empty(grouping.num_rows, 2 * F)
    a = x.new_empty(grouping.num_rows, F)
    num_tiles = _capacity(grouping) * -(-F // tile.n)
    grid, programs = grid_of(tile, x.device, num_tiles)
    launch(
        expert_forward.up_gated, (grid,),
        x if index_M is not None else _rows(x, tile.k, tile), index_M,
        _blocks(_halves(up_EHD), [1, 2, tile.n, tile.k], tile),
        _plain(bias_EH), u, b,
        *(_written(each, tile.n, tile) for each in (h[:, :F], h[:, F:], a)),
        grouping.tiles_3C, grouping.num_tiles, _capacity(grouping), x.stride(0), D, F,
        ACT=activation, BIAS=bias_EH is not None, RANK=rank, GATHER=index_M is not None,
        POINTERS=tile.pointers, EVEN=D % tile.k == 0, FLATTEN=tile.flatten, GROUP=tile.group,
        STAGGER=delay(tile, x.device, num_tiles), PROGRAMS=programs,
        BM=tile.m, BN=tile.n, BK=tile.k, BR=block, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return h, a


def _up_without_gate(
    x: torch.Tensor,
    up_EFD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None,
    tile: Tile | None,
    activation: Activation,
    bias_EF: torch.Tensor | None,
    more: More | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tile = tile or tile_of("up, no gate", more, grouping, x.device, *up_EFD.shape[1:])
    a = x.new_empty(grouping.num_rows, up_EFD.shape[1])
    how: dict[str, Any] = {
        "index_M": index_M,
        "bias": bias_EF,
        "activation": activation,
        "a": a,
        "more": more,
    }
    return _rows_times_weight(x, up_EFD, grouping, tile, transposed=True, **how), a


def down_kernel(
    a_MF: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    tile: Tile | None = None,
    *,
    bias_ED: torch.Tensor | None = None,
    more: More | None = None,
) -> torch.Tensor:
    tile = tile or tile_of("down", more, grouping, a_MF.device, *down_EDF.shape[1:])
    return _rows_times_weight(a_MF, down_EDF, grouping, tile, transposed=True, bias=bias_ED, more=more)


def d_rows_kernel(
    d_h_MH: torch.Tensor,
    up_EHD: torch.Tensor,
    grouping: Grouping,
    tile: Tile | None = None,
    *,
    more: More | None = None,
) -> torch.Tensor:
    tile = tile or tile_for(line_of("d_rows", more), d_h_MH.device, *up_EHD.shape[1:])
    return _rows_times_weight(d_h_MH, up_EHD, grouping, tile, transposed=False, more=more)


def narrow_kernel(
    rows: torch.Tensor,
    weight: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    tile: Tile | None = None,
    *,
    scale: float,
    transposed: bool,
) -> torch.Tensor:
    rank = weight.shape[1 if transposed else 2]
    tile = tile or replace(tile_for(narrow_line(rank), rows.device, *weight.shape[1:]), n=columns_of(rank))
    how: dict[str, Any] = {"transposed": transposed, "index_M": index_M, "scale": scale}
    return _rows_times_weight(rows, weight, grouping, tile, **how)


def d_hidden_kernel(
    dy: torch.Tensor,
    scores_M: torch.Tensor,
    h_MH: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    tile: Tile | None = None,
    *,
    activation: Activation = "swiglu",
    more: More | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The product, then one pass that turns dA into score x a where it lies: no buffer for dA alone."""
    from moeclipse.ops.triton import expert_backward

    F = down_EDF.shape[2]
    tile = tile or tile_for(line_of("d_hidden", more), dy.device, *down_EDF.shape[1:])
    how: dict[str, Any] = {"transposed": False, "index_M": index_M, "more": more}
    d_a_scaled = _rows_times_weight(dy, down_EDF, grouping, tile, **how)
    d_h = torch.empty_like(h_MH)
    d_score = dy.new_empty(grouping.num_rows, dtype=torch.float32)
    block_f = min(1024, 1 << (F - 1).bit_length())
    block_m = max(1, 2048 // block_f)
    launch(
        expert_backward.activation_backward, (-(-grouping.num_rows // block_m),),
        d_a_scaled, h_MH, scores_M.contiguous(), d_h, d_score, grouping.offsets_E1, len(grouping.counts_E), F,
        ACT=activation, GATED=activation in GATED, BLOCK_M=block_m, BLOCK_F=block_f, num_warps=8,
    )  # fmt: skip
    return d_h, d_a_scaled, d_score


def _rows_times_weight(
    rows: torch.Tensor,
    weight: torch.Tensor,
    grouping: Grouping,
    tile: Tile,
    *,
    transposed: bool,
    index_M: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    a: torch.Tensor | None = None,
    more: More | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """The product; with an activation, its value goes to `a` on the way."""
    from moeclipse.ops.triton import expert_forward

    K, N = rows.shape[1], weight.shape[1 if transposed else 2]
    out = rows.new_empty(grouping.num_rows, N)

    def blocks(weight: torch.Tensor, block: int) -> Operand:
        if transposed:
            return _blocks(weight.flatten(0, 1), [tile.n, block], tile)
        return _blocks(weight, [1, block, tile.n], tile)

    rank, block = _narrow(more)
    gather, piece = index_M is not None, tile.n // tile.split
    num_tiles = _capacity(grouping) * -(-N // tile.n)
    grid, programs = grid_of(tile, rows.device, num_tiles)
    launch(
        expert_forward.rows_times_weight, (grid,),
        rows if gather else _rows(rows, tile.k, tile), index_M, blocks(weight, tile.k), _plain(bias),
        None if more is None else _rows(more.rows_MR, block, tile),
        None if more is None else blocks(more.weight, block), scale,
        _written(out, piece, tile), None if a is None else _written(a, piece, tile),
        grouping.tiles_3C, grouping.num_tiles, _capacity(grouping), rows.stride(0), K, N,
        ACT=activation or "none", BIAS=bias is not None, RANK=rank, SCALED=scale != 1.0, GATHER=gather,
        POINTERS=tile.pointers, EVEN=K % tile.k == 0, TRANSPOSED=transposed, FLATTEN=tile.flatten,
        GROUP=tile.group, STAGGER=delay(tile, rows.device, num_tiles), PROGRAMS=programs,
        BM=tile.m, BN=tile.n, BK=tile.k, BR=block, SPLIT=tile.split,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _blocks(operand: torch.Tensor, block: list[int], tile: Tile) -> Operand:
    """An operand of which tiles read blocks: a descriptor, or the tensor itself, whose rows lie close."""
    return operand.contiguous() if tile.pointers else descriptors.blocks(operand, block)


def _rows(rows: torch.Tensor, columns: int, tile: Tile) -> Operand:
    """Rows as they lie, of which a tile reads so many columns at once."""
    return rows if tile.pointers else _blocks(rows, [tile.m, columns], tile)


def _halves(weight_EHK: torch.Tensor) -> torch.Tensor:
    """[E, 2, F, K]: `unflatten` is Python, and takes the host as long as a launch."""
    E, H, K = weight_EHK.shape
    return weight_EHK.view(E, 2, H // 2, K)


def _written(rows: torch.Tensor, columns: int, tile: Tile) -> Operand:
    """Rows that tiles write, and none past an expert's last."""
    return rows if tile.pointers else descriptors.ragged(rows, [tile.m, columns])


def tile_of(kernel: str, more: More | None, grouping: Grouping, device: torch.device, *widths: int) -> Tile:
    """Where tokens are few, weights are all that is read: small tiles, many programs.

    Larger tiles would do as well, as those of backward: what several cover, all of them write alike.
    """
    few = "few " if grouping.tile_rows == FEW_ROWS else ""
    return tile_for(few + line_of(kernel, more), device, *widths)


def line_of(kernel: str, more: More | None = None) -> str:
    """Of the table of tiles: what an adapter brings takes shared memory."""
    return kernel if more is None else f"{kernel} and adapter"


def narrow_line(rank: int) -> str:
    return "narrow" if rank <= WIDEST_BLOCK else "narrow, 256 columns"


def _narrow(more: More | None) -> tuple[int, int]:
    """(rank, columns of it that are multiplied at once); (0, 16): there is none."""
    rank = 0 if more is None else more.rows_MR.shape[1]
    return rank, min(columns_of(rank), WIDEST_BLOCK)


def columns_of(rank: int) -> int:
    """A block of a tensor core that holds them."""
    return max(16, 1 << (rank - 1).bit_length()) if rank else 16


def _plain(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.contiguous()


def _capacity(grouping: Grouping) -> int:
    assert grouping.tiles_3C is not None
    return grouping.tiles_3C.shape[1]
