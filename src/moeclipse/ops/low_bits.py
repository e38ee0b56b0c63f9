"""fp32 weights as the bf16 weights that were rounded from them, and the bits that this left over.

    wide = bits of the bf16 number, shifted up 16        high half: what forward computes with
         + low, a signed 16-bit number                   what rounding took away or added
         + 2^16 where `ties` says so                     one bit for each number

Idea. Weights in bf16 and master weights in fp32 have their upper half in common, nearly: rounding to the
nearest may go up. The difference as an integer, of the two as patterns of bits, goes from -2^15 to 2^15.

That is one value too many for 16 bits, and it cannot be helped: to an even bf16 number 65,537 fp32 numbers
are rounded, because a tie from either side goes there, and to an odd one 65,535. So -2^15 and 2^15 share a
pattern, and one bit says which it is: 17 bits instead of 32, and every finite fp32 number comes back exactly.

Contract. The bf16 number is torch's (ties to even): a run with low bits has the bits of one with an fp32
master. A NaN comes back as some NaN. Bit k of byte b of `ties` belongs to element 8 b + k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TIE = 1 << 15
ONE = 1 << 16
EIGHT = 8


@dataclass(frozen=True)
class LowBits:
    """What is kept beside a flat bf16 tensor."""

    low: torch.Tensor
    """[n] int16."""
    ties: torch.Tensor
    """[n / 8, rounded up] uint8."""

    @classmethod
    def zeros(cls, length: int, device: torch.device) -> LowBits:
        """Of weights that bf16 holds exactly."""
        low = torch.zeros(length, dtype=torch.int16, device=device)
        return cls(low, torch.zeros(-(-length // EIGHT), dtype=torch.uint8, device=device))

    @property
    def num_bytes(self) -> int:
        return 2 * self.low.numel() + self.ties.numel()


def split(wide: torch.Tensor, rounded: torch.Tensor, bits: LowBits) -> None:
    """Overwrite `rounded` with fp32 weights rounded to bf16, and `bits` with the rest."""
    rounded.copy_(wide)
    rest = wide.view(torch.int32) - _shifted(rounded)
    bits.low.copy_(rest)
    bits.ties.copy_(pack(rest == TIE))


def join(rounded: torch.Tensor, bits: LowBits, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """The fp32 weights [start, stop) again."""
    stop = len(rounded) if stop is None else stop
    return join_part(rounded[start:stop], bits, start, stop)


def join_part(rounded: torch.Tensor, bits: LowBits, start: int, stop: int) -> torch.Tensor:
    """The same where `rounded` are these alone."""
    whole = _shifted(rounded) + bits.low[start:stop]
    return (whole + unpack(bits.ties, start, stop) * ONE).view(torch.float32)


def _shifted(rounded: torch.Tensor) -> torch.Tensor:
    return rounded.view(torch.int16).to(torch.int32) << 16


def pack(flags: torch.Tensor) -> torch.Tensor:
    """Flat bools, eight in a byte."""
    padded = torch.nn.functional.pad(flags, (0, -len(flags) % EIGHT)).view(-1, EIGHT)
    return (padded << torch.arange(EIGHT, device=flags.device)).sum(1).to(torch.uint8)


def unpack(packed: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Flags [start, stop) as int32 of 0 and 1."""
    first = start // EIGHT
    some = packed[first : -(-stop // EIGHT)].to(torch.int32)
    flags = some[:, None] >> torch.arange(EIGHT, dtype=torch.int32, device=packed.device) & 1
    return flags.flatten()[start - first * EIGHT : stop - first * EIGHT]
