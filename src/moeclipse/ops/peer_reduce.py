"""Sum what all ranks hold: the same bits whoever adds, because ranks are added in order.

    sum_ranks      out = round(x_0 + x_1 + ... + x_{P-1})          added from left to right in fp32
    add_rms_norm   h = round(residual + x_0 + ... ),  y = round(h / rms(h) * weight)

fp64 inputs are added in fp64. A result is rounded to the dtype of the inputs once, at the end, so two ranks
or eight lose the same single rounding. `h` is rounded before it is normalised: then it does not matter which
rank computed which rows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 1 << 14  # elements added at a time: operands and fp32 temporaries stay in the first caches


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def part_bounds(length: int, num_ranks: int) -> list[int]:
    """Where each rank's part begins, and the end. The last rank takes the remainder: 403 over 4 ranks is
    [0, 100, 200, 300, 403]."""
    part = length // num_ranks
    return [rank * part for rank in range(num_ranks)] + [length]


def sum_ranks_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition, without a thought for speed."""
    total = parts[0].to(wide_of(parts[0].dtype))
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total.to(parts[0].dtype)


def sum_ranks(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Flat `parts` of equal length into `out`, which must not overlap any part after the second."""
    if len(parts) == 2:
        # torch computes a sum of two in fp32 and rounds once, so no temporary is needed.
        return torch.add(parts[0], parts[1], out=out)
    if out.dtype == wide_of(out.dtype):
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out
    length = out.numel()
    total = torch.empty(min(length, BLOCK), dtype=torch.float32)
    other = torch.empty_like(total)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        if stop - start < total.numel():
            total, other = total[: stop - start], other[: stop - start]
        total.copy_(parts[0][start:stop])
        for part in parts[1:]:
            other.copy_(part[start:stop])
            total.add_(other)
        out[start:stop].copy_(total)
    return out


def add_residual(parts: Sequence[torch.Tensor], residual: torch.Tensor) -> torch.Tensor:
    """h = round(residual + sum of the parts), added in that order of ranks, then the residual."""
    total = parts[0].to(wide_of(residual.dtype), copy=True)  # a part lies in memory that others still read
    for part in parts[1:]:
        total += part
    return (total + residual).to(residual.dtype)


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = h.to(wide_of(h.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(h.dtype)


@dataclass(frozen=True, kw_only=True)
class PeerSpace:
    """What the kernels of one rank need to know of the group; `comm/peer_cuda` makes it."""

    table: torch.Tensor
    """[P] int64: the address of each rank's buffer, flags first."""
    counts: torch.Tensor
    """[max_blocks] int32: rounds done."""
    status: torch.Tensor
    """[1] int32 in pinned memory: 1 + a peer that did not arrive."""
    clock: torch.Tensor
    """[max_blocks] int64: scratch for reading the time."""
    area_bytes: int
    head_bytes: int
    limit_ns: int
    rank: int
    num_ranks: int
    max_blocks: int


class AllReduceKernel:
    """out = sum over ranks of flat x, on a device.

    Compiled kernels are kept, and launched with arguments by position: binding them by name in every call
    takes several times as long as the kernel.
    """

    def __init__(self, space: PeerSpace) -> None:
        self._space, self._compiled = space, {}  # type: ignore[var-annotated]
        self._shared = (space.table, space.counts, space.status, space.clock)
        self._sizes = (space.area_bytes, space.head_bytes, space.limit_ns)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, two_stages: bool) -> None:
        space, length = self._space, x.numel()
        block = 8192 // x.dtype.itemsize
        part = length // space.num_ranks // 16 * 16  # parts begin on whole vectors
        share = part if two_stages else length
        grid = (max(1, min(space.max_blocks, -(-share // block))), 1, 1)
        constants = (space.rank, space.num_ranks, two_stages, block, space.max_blocks)
        arguments = (x, out, *self._shared, length, part, *self._sizes, *constants)
        # What Triton compiles anew for: see the arguments that differ between calls.
        key = (x.dtype, two_stages, x.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        from moeclipse.ops.triton import peer_reduce

        self._compiled[key] = peer_reduce.all_reduce[grid](*arguments, num_warps=16)


def all_reduce_rms_norm_kernel(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor],
    space: PeerSpace,
) -> None:
    """out = (normed, h); see `add_residual` and `rms_norm`."""
    from moeclipse.ops.triton import peer_reduce

    T, D = x_TD.shape
    block = 1 << (D - 1).bit_length()
    peer_reduce.all_reduce_rms_norm[(min(space.max_blocks, T),)](
        x_TD, residual_TD, weight_D, *out, space.table, space.counts, space.status, space.clock, T, D, eps,
        space.area_bytes, space.head_bytes, space.limit_ns,
        RANK=space.rank, W=space.num_ranks, BLOCK=block, MAX_BLOCKS=space.max_blocks,
        num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
