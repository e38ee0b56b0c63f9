"""One matrix product for each group of rows, all in one call, and weight gradients added where they belong.

Rows are grouped: the first counts[0] belong to expert 0, the next counts[1] to expert 1, ... Groups may
be empty. The reference loops; on CUDA torch's grouped kernel does all groups at once where it can
(bf16 operands, widths that are multiples of 8). One group alone is one product, and no count leaves the host.

    forward   y_n  = x_n  W_e^T        W_EOI [experts, out, in]
    dgrad     dx_n = dy_n W_e
    wgrad     dW_e += dy_e^T x_e       rows of expert e: offsets[e] to offsets[e + 1]
    dense     dW   += dy^T x

Contract of weight gradients: they are added in fp32, without a temporary of the weight's size. What they are
added to may be wider than the operands (fp32 for bf16 rows) and is changed in place; with `accumulate=False`
it is overwritten, also where there are no rows: with zeros. `dy_index` and `x_index` name the row of dy or x
that stands at each place, so that a gathered copy never exists. Offsets stay on the device.

Hazard: their kernels need widths that are multiples of 8 and 16-byte aligned rows; other operands take the
reference, which reads the offsets on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from moeclipse.ops import descriptors
from moeclipse.ops.launch import launch
from moeclipse.ops.tuning import Tile, delay, device_fits, grid_of, has_warpgroups, num_programs, tile_for

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
NARROW = 64
"""Columns, up to which a side counts as narrow."""


def grouped_mm(x_NI: torch.Tensor, weight_EOI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """y_NO: each row times the transposed weight of its expert."""
    return _grouped(x_NI, weight_EOI.transpose(1, 2), counts)


def grouped_mm_dgrad(dy_NO: torch.Tensor, weight_EOI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """dx_NI: each row times the weight of its expert."""
    return _grouped(dy_NO, weight_EOI, counts)


def grouped_mm_reference(x_NI: torch.Tensor, weight_EIO: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    out = x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])
    start = 0
    for weight_IO, count in zip(weight_EIO, counts, strict=True):
        if count:
            torch.mm(x_NI[start : start + count], weight_IO, out=out[start : start + count])
        start += count
    return out


def _grouped(x_NI: torch.Tensor, weight_EIO: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    if len(counts) == 1:
        return x_NI @ weight_EIO[0]
    if _has_kernel(x_NI, weight_EIO):
        ends = torch.tensor(counts, device=x_NI.device).cumsum(0).to(torch.int32)
        return F.grouped_mm(x_NI, weight_EIO, offs=ends)
    return grouped_mm_reference(x_NI, weight_EIO, counts)


def _has_kernel(x_NI: torch.Tensor, weight_EIO: torch.Tensor) -> bool:
    return (
        x_NI.is_cuda
        and x_NI.dtype == torch.bfloat16
        and x_NI.shape[0] > 0
        and x_NI.shape[1] % 8 == 0
        and weight_EIO.shape[2] % 8 == 0
        and hasattr(F, "grouped_mm")
    )


def grouped_mm_wgrad(
    dy_NO: torch.Tensor,
    x_NI: torch.Tensor,
    counts: Sequence[int],
    *,
    into: torch.Tensor,
    kernels: bool = True,
) -> None:
    """Add dy_e^T x_e to into[e]; an expert without rows adds nothing."""
    if len(counts) == 1:
        dense_wgrad(dy_NO, x_NI, into[0])
        return
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=dy_NO.device)
    (grouped_wgrad if kernels else grouped_wgrad_reference)(dy_NO, x_NI, offsets, into)


def grouped_wgrad_reference(
    dy_MN: torch.Tensor,
    x_MD: torch.Tensor,
    offsets_E1: torch.Tensor,
    into_END: torch.Tensor,
    *,
    dy_index_M: torch.Tensor | None = None,
    x_index_M: torch.Tensor | None = None,
    accumulate: bool = True,
) -> None:
    bounds = offsets_E1.tolist()
    for sum_ND, start, stop in zip(into_END, bounds, bounds[1:], strict=False):
        if start < stop:
            dy = dy_MN[start:stop] if dy_index_M is None else dy_MN[dy_index_M[start:stop].long()]
            x = x_MD[start:stop] if x_index_M is None else x_MD[x_index_M[start:stop].long()]
            dense_wgrad(dy, x, sum_ND, accumulate=accumulate)
        elif not accumulate:
            sum_ND.zero_()


def dense_wgrad(
    dy_MN: torch.Tensor, x_MD: torch.Tensor, into_ND: torch.Tensor, *, accumulate: bool = True
) -> None:
    """into += dy^T x. On CUDA the product itself adds in fp32; elsewhere equal types add in place too."""
    wide = into_ND.dtype
    if dy_MN.is_cuda and wide == torch.float32 and dy_MN.dtype in KERNEL_DTYPES:
        if accumulate:
            torch.addmm(into_ND, dy_MN.t(), x_MD, out_dtype=wide, out=into_ND)
        else:
            torch.mm(dy_MN.t(), x_MD, out_dtype=wide, out=into_ND)
    elif wide == dy_MN.dtype or wide.itemsize > dy_MN.dtype.itemsize:
        # A factor of 0 overwrites: not even NaN stays.
        into_ND.addmm_(dy_MN.t().to(wide), x_MD.to(wide), beta=int(accumulate))
    elif accumulate:
        into_ND.add_(dy_MN.t() @ x_MD)
    else:
        into_ND.copy_(dy_MN.t() @ x_MD)


def grouped_wgrad(
    dy_MN: torch.Tensor,
    x_MD: torch.Tensor,
    offsets_E1: torch.Tensor,
    into_END: torch.Tensor,
    *,
    dy_index_M: torch.Tensor | None = None,
    x_index_M: torch.Tensor | None = None,
    accumulate: bool = True,
) -> None:
    """Add dy_e^T x_e to into[e] for all experts at once."""
    if accumulate and into_END.dtype in KERNEL_DTYPES and wgrad_fits(dy_MN, x_MD, into_END, False):
        # The copy engine adds fp32 alone; a sum of its own is added behind it.
        fresh_END = torch.empty_like(into_END)
        indices = {"dy_index_M": dy_index_M, "x_index_M": x_index_M}
        grouped_wgrad(dy_MN, x_MD, offsets_E1, fresh_END, **indices, accumulate=False)
        into_END.add_(fresh_END)
        return
    picked = (
        grouped_wgrad_kernel
        if dy_MN.is_cuda and wgrad_fits(dy_MN, x_MD, into_END, accumulate)
        else grouped_wgrad_reference
    )
    picked(
        dy_MN,
        x_MD,
        offsets_E1,
        into_END,
        dy_index_M=dy_index_M,
        x_index_M=x_index_M,
        accumulate=accumulate,
    )


def wgrad_fits(dy_MN: torch.Tensor, x_MD: torch.Tensor, into_END: torch.Tensor, accumulate: bool) -> bool:
    """Whether the kernel takes these operands."""
    rows_fit = all(
        t.dtype in KERNEL_DTYPES and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0
        for t in (dy_MN, x_MD)
    )
    # The copy engine adds fp32; bf16 it only writes.
    into_fits = into_END.dtype == torch.float32 or (not accumulate and into_END.dtype in KERNEL_DTYPES)
    return (
        rows_fit
        and into_fits
        and dy_MN.dtype == x_MD.dtype
        and into_END.is_contiguous()
        and into_END.shape[1] % 8 == 0
        and into_END.shape[2] % 8 == 0
        and len(dy_MN) > 0
        and len(x_MD) > 0
        and device_fits(dy_MN.device)
    )


def grouped_wgrad_kernel(
    dy_MN: torch.Tensor,
    x_MD: torch.Tensor,
    offsets_E1: torch.Tensor,
    into_END: torch.Tensor,
    *,
    dy_index_M: torch.Tensor | None = None,
    x_index_M: torch.Tensor | None = None,
    accumulate: bool = True,
    tile: Tile | None = None,
) -> None:
    from moeclipse.ops.triton import wgrad

    num_experts, N, D = into_END.shape
    gather_dy, gather_x = dy_index_M is not None, x_index_M is not None
    roles = has_warpgroups(dy_MN.device) and not (gather_dy and gather_x)
    tile = tile or _narrow_tile(dy_MN.device, N, D)
    kind = ("wgrad_roles" if roles else "wgrad") + ("_x" if gather_x else "_dy" if gather_dy else "")
    # Overwritten fp32 sums take as much room on their way as those that are added.
    wide = accumulate or (roles and into_END.dtype == torch.float32)
    tile = tile or tile_for(f"{kind}, add" if wide else kind, dy_MN.device, N, D)
    if tile.staging and roles:
        _by_warpgroups(dy_MN, x_MD, offsets_E1, into_END, dy_index_M, x_index_M, accumulate, tile)
        return
    wide_dy, wide_x = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
    dy, x, into = dy_MN, x_MD, into_END
    if not tile.pointers:
        dy = dy_MN if gather_dy else descriptors.ragged(dy_MN, [tile.k, wide_dy])
        x = x_MD if gather_x else descriptors.ragged(x_MD, [tile.k, wide_x])
        piece = [tile.n // tile.split, tile.m] if tile.swap else [tile.m, tile.n // tile.split]
        into = descriptors.blocks(into_END, [1, *piece])
    num_tiles = num_experts * -(-N // wide_dy) * -(-D // wide_x)
    grid, programs = grid_of(tile, dy_MN.device, num_tiles)
    adding = "reduce" if dy_MN.is_cuda and not tile.pointers else "add"
    launch(
        wgrad.grouped_wgrad, (grid,),
        dy, dy_index_M, dy_MN.stride(0), x, x_index_M, x_MD.stride(0), into, offsets_E1, num_experts, N, D,
        GATHER_DY=gather_dy, GATHER_X=gather_x, POINTERS=tile.pointers,
        EVEN=N % wide_dy == 0 and D % wide_x == 0, MODE=adding if accumulate else "store",
        FLATTEN=tile.flatten, AHEAD=tile.ahead, SWAP=tile.swap, GROUP=tile.group,
        STAGGER=delay(tile, dy_MN.device, num_tiles), PROGRAMS=programs,
        PADDED=max(128, 1 << (num_experts - 1).bit_length()),
        BM=tile.m, BN=tile.n, BK=tile.k, SPLIT=tile.split, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _narrow_tile(device: torch.device, N: int, D: int) -> Tile | None:
    """For gradients with one side of few columns (adapters), which only reading the wide rows takes time.

    The narrow side is that of `n`; None: both are wide.
    """
    if min(N, D) > NARROW:
        return None
    tile = tile_for("wgrad_narrow", device, N, D)
    return replace(tile, n=max(16, 1 << (min(N, D) - 1).bit_length()), swap=N < D)


def _by_warpgroups(
    dy_MN: torch.Tensor,
    x_MD: torch.Tensor,
    offsets_E1: torch.Tensor,
    into_END: torch.Tensor,
    dy_index_M: torch.Tensor | None,
    x_index_M: torch.Tensor | None,
    accumulate: bool,
    tile: Tile,
) -> None:
    """The kernel whose warps divide the work; one operand may be gathered."""
    from moeclipse.ops.triton import wgrad_gluon

    num_experts, N, D = into_END.shape
    wide = (128, 16)  # bytes that are swizzled together, bits of an element
    gather_dy, gather_x = dy_index_M is not None, x_index_M is not None
    gathered = dy_MN if gather_dy else x_MD
    size, piece = into_END.itemsize, tile.n // tile.split
    written = (min(128, piece * size), 8 * size)
    num_tiles = num_experts * -(-N // tile.m) * -(-D // tile.n)
    programs = num_programs(tile, dy_MN.device)
    launch(
        wgrad_gluon.grouped_wgrad, (programs,),
        dy_MN if gather_dy else descriptors.ragged(dy_MN, [tile.k, tile.m // 2], wide),
        x_MD if gather_x else descriptors.ragged(x_MD, [tile.k, tile.n], wide),
        dy_index_M if gather_dy else x_index_M, gathered.stride(0) // 8,
        descriptors.blocks(into_END, [1, 64, piece], written), offsets_E1, num_experts, N, D,
        GATHER="dy" if gather_dy else "x" if gather_x else "none", ADD=accumulate, GROUP=tile.group,
        STAGGER=delay(tile, dy_MN.device, num_tiles), PROGRAMS=programs,
        BM=tile.m, BN=tile.n, BK=tile.k, STAGES=tile.stages, BUFFERS=tile.staging, num_warps=4,
    )  # fmt: skip
