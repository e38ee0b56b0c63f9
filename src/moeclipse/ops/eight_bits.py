"""Moments in 8 bits: small floating-point numbers whose exponents count down from their block's largest.

    adam_m    sign, 4 bits of exponent, 3 of fraction            adam_v    4 bits of exponent, 4 of fraction
    value   = (1 + fraction) 2^(exponent - 15 + top)             exponent 0: fraction 2^(top - 14), down to 0
    top     = one byte for each block of up to 256 elements: the exponent of its largest number

Idea. Moments of neighbours differ by orders of magnitude, and an update is the ratio of two of them: what
counts is the relative error, over a wide range. So steps grow with the number, as they do in the dynamic maps
that 8-bit optimizers are known to train with. Scales are powers of two: they cost no precision where steps
are relative, all of it is integer arithmetic on the bits of fp32, and every value is a bf16 number.

Rounding is by chance (`ops/rounding`): where steps are 6 % or 12 %, v times 0.98 would round back to v for
ever, and m would not follow a gradient that changes slowly. On average nothing is lost.

Contract. Blocks are cut from rows of logical matrices (`train/optim/quant_blocks`), and the chance is that of
step and element: any layout gives the same bits. A value that the code has stays what it is, so what was
decoded is encoded again without loss. A second moment above zero stays above zero: it divides.

Hazard. Numbers below 2^-126 count as zero, and blocks whose largest is below 2^-95 lose range first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOP_EXPONENT = 15
LOWEST_TOP = 32
"""In the bias of fp32: the smallest step of a block is still a normal number."""
CHANCE = 8
"""Random bits that decide about one rounding."""
NEAREST = 1 << (CHANCE - 1)
M_FRACTION, V_FRACTION = 3, 4


@dataclass(frozen=True)
class EightBits:
    """One moment of a flat shard; blocks lie one after the other."""

    codes: torch.Tensor
    """[n] uint8."""
    tops: torch.Tensor
    """[n / block] uint8."""
    block: int
    fraction: int
    """Bits of it; what 3 leave free of 7 is a sign."""

    @classmethod
    def zeros(cls, length: int, block: int, fraction: int, device: torch.device) -> EightBits:
        codes = torch.zeros(length, dtype=torch.uint8, device=device)
        tops = torch.full((length // block,), LOWEST_TOP, dtype=torch.uint8, device=device)
        return cls(codes, tops, block, fraction)

    @property
    def signed(self) -> bool:
        return self.fraction == M_FRACTION

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.tops.numel()


def encode(values: torch.Tensor, into: EightBits, chance: torch.Tensor | int = NEAREST) -> None:
    """Overwrite a moment with fp32 values; `chance`: a number below 256 for each of them."""
    fraction, block = into.fraction, into.block
    bits = values.view(torch.int32) & 0x7FFFFFFF
    bits = torch.where(bits < 1 << 23, 0, bits)
    # A number that could be rounded up beyond the last code belongs to the next exponent.
    tops = (bits.view(-1, block).amax(1) + (1 << (23 - fraction)) - 1 >> 23).clamp(LOWEST_TOP, 254)
    field = (bits >> 23) - (tops - TOP_EXPONENT).repeat_interleave(block)
    mantissa = torch.where(bits == 0, 0, bits & 0x7FFFFF | 1 << 23)
    small = mantissa >> (1 - field).clamp(0, 24)
    scaled = torch.where(field > 0, (field << 23) + (bits & 0x7FFFFF), small)
    codes = scaled + (chance << (23 - fraction - CHANCE)) >> (23 - fraction)
    codes = codes.clamp(max=(TOP_EXPONENT + 1 << fraction) - 1)
    if into.signed:
        codes = codes | (values.view(torch.int32) >> 31 & 1) << 7
    else:
        codes = torch.where(bits > 0, codes.clamp(min=1), codes)
    into.codes.copy_(codes)
    into.tops.copy_(tops)


def decode(moment: EightBits, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """fp32 values [start, stop)."""
    stop = len(moment.codes) if stop is None else stop
    fraction, block = moment.fraction, moment.block
    codes = moment.codes[start:stop].to(torch.int32)
    first = start // block
    tops = moment.tops[first : -(-stop // block)].to(torch.int32).repeat_interleave(block)
    tops = tops[start - first * block : stop - first * block]
    magnitude = codes & (TOP_EXPONENT + 1 << fraction) - 1
    field = magnitude >> fraction
    steps = magnitude - (field.clamp(min=1) - 1 << fraction)
    unit = (tops - (TOP_EXPONENT - 1) - fraction + (field.clamp(min=1) - 1) << 23).view(torch.float32)
    values = steps * unit
    return torch.where(codes > 127, -values, values) if moment.signed else values
