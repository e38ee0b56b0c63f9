"""Matrices in small floating-point numbers whose blocks have factors, kept as folders have them.

    Mxfp4        e2m1 in blocks of 32 along a row, two in a byte, the first in its low half; a block has a
                 power of two (e8m0: 2^(byte - 127), 255 is NaN). gpt-oss; its matrices are [out, in] here
    Fp8Blocks    e4m3 [R, C], whose blocks of 128 x 128 have an fp32 factor each; the last ones of rows and
                 columns may be cut short. DeepSeek-V3

Contract. Nothing is rounded to get here from a folder; `quantise` makes them of other numbers. Mxfp4 is exact
in bf16 and fp32; a number of Fp8Blocks is a product in fp32, rounded once. What reads a folder expands it by
the same two functions (`hf/quantised`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

from moeclipse.ops.nf4 import midpoints
from moeclipse.ops.quantised import WARPS, WORDS, Quantised, fits, span_of

MX_BLOCK = 32
"""Numbers of mxfp4 that share a power of two."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of a number of four stand for; the highest is its sign."""
SIDES = (128, 128)
TILE = (32, 128)
"""Rows and columns that a program of the kernel for fp8 has."""


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Quantised):
    """The shape is that of the numbers."""

    codes: torch.Tensor
    """[..., R, C / 32, 16] uint8."""
    scales: torch.Tensor
    """[..., R, C / 32] uint8."""

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Mxfp4:
        """As they lie in a folder."""
        kept = {codes.dtype, scales.dtype} == {torch.uint8} and codes.ndim >= 3
        if not kept or tuple(codes.shape) != (*scales.shape, MX_BLOCK // 2):
            raise ValueError(
                f"codes {list(codes.shape)} and scales {list(scales.shape)} are not those of mxfp4: "
                f"uint8, and {MX_BLOCK // 2} codes for each scale"
            )
        shape = (*scales.shape[:-1], MX_BLOCK * scales.shape[-1])
        return cls(codes=codes.contiguous(), scales=scales.contiguous(), shape=shape, dtype=dtype)

    @classmethod
    def quantise(cls, values: torch.Tensor) -> Mxfp4:
        """Of fp32 numbers, as the OCP's standard has it: a block's largest exponent less 2, ties to even."""
        blocks = values.unflatten(-1, (-1, MX_BLOCK))
        power = (torch.frexp(blocks.abs().amax(-1)).exponent - 3).clamp(-127, 127)
        size = torch.ldexp(blocks.abs(), -power[..., None])
        bounds = midpoints(e2m1(values.device)[: len(E2M1)])
        codes = torch.bucketize(size, bounds, out_int32=True)
        tie = size == bounds[codes.clamp(max=len(bounds) - 1)]
        codes = (codes + (tie & (codes % 2 == 1))).to(torch.uint8) | (blocks < 0).to(torch.uint8) << 3
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        return cls.of(packed, (power + 127).to(torch.uint8))

    def experts(self, first: int, stop: int) -> Mxfp4:
        shape = span_of(self.shape, first, stop)[2]
        return replace(self, codes=self.codes[first:stop], scales=self.scales[first:stop], shape=shape)

    def numbers(self, matrix: int, first: int, stop: int) -> torch.Tensor:
        codes, scales = (
            kept.view(self.num_matrices, self.shape[-2], -1) for kept in (self.codes, self.scales)
        )
        codes, scales = codes[matrix, first:stop], scales[matrix, first:stop]
        return expand_mxfp4(codes.unflatten(-1, (-1, MX_BLOCK // 2)), scales)

    def launch(self, out: torch.Tensor, first: int) -> bool:
        count, (height, width) = out.shape[-2] * out.shape[-1], self.shape[-2:]
        if not fits(out):
            return False
        from moeclipse.ops.triton import quantised as kernels

        spans = -(-count // (8 * WORDS))
        kernels.decode_mxfp4[(self.num_matrices * spans,)](
            self.codes.view(torch.int32), self.scales, e2m1(out.device), out, first * width, height * width,
            count, spans, WORDS=WORDS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return True


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks(Quantised):
    codes: torch.Tensor
    """[..., R, C] float8_e4m3fn."""
    scales: torch.Tensor
    """[..., R / block, C / block] fp32."""
    block: tuple[int, int] = SIDES

    @classmethod
    def of(
        cls, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16,
        block: tuple[int, int] = SIDES,
    ) -> Fp8Blocks:  # fmt: skip
        """As they lie in a folder: a number is code times scale."""
        sides = zip(codes.shape[-2:], block, strict=True)
        wanted = (*codes.shape[:-2], *(-(-size // side) for size, side in sides))
        if (codes.dtype, scales.dtype, tuple(scales.shape)) != (torch.float8_e4m3fn, torch.float32, wanted):
            raise ValueError(
                f"codes {list(codes.shape)} of {codes.dtype} and scales {list(scales.shape)} of "
                f"{scales.dtype} are not e4m3 with an fp32 scale for each block of {block}: {list(wanted)}"
            )
        kept: dict[str, Any] = {"codes": codes.contiguous(), "scales": scales.contiguous()}
        return cls(shape=tuple(codes.shape), dtype=dtype, block=block, **kept)

    @classmethod
    def quantise(cls, values: torch.Tensor) -> Fp8Blocks:
        """Of fp32 numbers: the largest of a block becomes the largest of e4m3."""
        (height, width), (down, across) = values.shape[-2:], SIDES
        padded = pad(values, (0, -width % across, 0, -height % down))
        tiles = padded.unflatten(-1, (-1, across)).unflatten(-3, (-1, down))
        largest = tiles.abs().amax((-3, -1))
        scales = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
        codes = (tiles / scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
        return cls.of(codes[..., :height, :width].to(torch.float8_e4m3fn), scales)

    def experts(self, first: int, stop: int) -> Fp8Blocks:
        shape = span_of(self.shape, first, stop)[2]
        return replace(self, codes=self.codes[first:stop], scales=self.scales[first:stop], shape=shape)

    def numbers(self, matrix: int, first: int, stop: int) -> torch.Tensor:
        codes = self.codes.view(-1, *self.shape[-2:])[matrix, first:stop]
        scales = self.scales.view(-1, *self.scales.shape[-2:])[matrix]
        under = scales[first // self.block[0] : -(-stop // self.block[0])]
        return expand_fp8(codes, under, self.block, (first, 0))

    def launch(self, out: torch.Tensor, first: int) -> bool:
        (height, width), stop = self.shape[-2:], first + out.shape[-2]
        if (
            not fits(out)
            or width % 16
            or any(side % tile for side, tile in zip(self.block, TILE, strict=True))
        ):
            return False
        from moeclipse.ops.triton import quantised as kernels

        down, across = -(-stop // TILE[0]) - first // TILE[0], -(-width // TILE[1])
        kernels.decode_fp8[(self.num_matrices * down * across,)](
            self.codes.view(torch.uint8), self.scales, out, first, stop, height, width,
            *self.scales.shape[-2:], down, across, BLOCK_ROWS=self.block[0], BLOCK_COLUMNS=self.block[1],
            ROWS=TILE[0], COLUMNS=TILE[1], enable_fp_fusion=False,
        )  # fmt: skip
        return True


def expand_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., G, 16] bytes and [..., G] exponents -> [..., 32 G] in float32."""
    halves = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).int()
    return (e2m1(codes.device)[halves] * powers_of_two(scales)[..., None]).flatten(-2)


def expand_fp8(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """A part of a matrix in float32: it begins at `first`, and the factors with the one for that."""
    numbers = zip(codes.shape, block, first, strict=True)
    down, across = (
        torch.arange(start, start + size, device=codes.device) // side - start // side
        for size, side, start in numbers
    )
    return codes.float() * scales.float()[down][:, across]


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """e8m0 in float32, by its bits: 2^-127 has no exponent of its own there."""
    bits = exponents.to(torch.int32)
    bits = torch.where(bits == 0, 0x00400000, torch.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.to(torch.int32).view(torch.float32)


@cache
def e2m1(device: torch.device) -> torch.Tensor:
    both = [*E2M1, *(-value for value in E2M1)]
    return torch.tensor(both, dtype=torch.float32, device=device)
