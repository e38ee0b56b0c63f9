"""Stochastic rounding of fp32 to bf16: up or down by chance, so that on average nothing is lost.

    rounded = upper half of (bits of x + r)         r: 16 random bits, those that decide about the lower half

Idea. A weight that is kept in bf16 alone would swallow every update below half a unit of its last place.
Rounded by chance, it takes each of them with a probability of its size.

Contract. r is a pure function of (seed, step, name of the logical tensor, row, column): whatever part of a
tensor a rank holds, and wherever that lies in its shard, every element gets the same bits. A number that
bf16 has stays what it is. Kernels and reference give the same bits.

A shard is described by its stretches: which elements of which logical matrix lie where in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from moeclipse.ops.random import GOLDEN, scramble, shift_right, signed

LOW_BITS = 16


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Neighbouring elements of a shard that are neighbours in a matrix, or in some columns of it."""

    offset: int
    """Of the first, in the shard."""
    length: int
    key: int
    """A number for the logical tensor."""
    start: int
    """Of the first, in the matrix or in those columns of it."""
    columns: int
    """Of what `start` counts in."""
    left: int = 0
    """The logical column of its first one."""

    def words(self) -> list[int]:
        return [self.offset, self.offset + self.length, signed(self.key), self.start, self.columns, self.left]


class Stretches:
    """All of a shard, on its device; the tables are made once."""

    def __init__(self, stretches: Sequence[Stretch], length: int, device: torch.device, block: int) -> None:
        """`block`: how many elements a program of a kernel takes."""
        self.stretches, self.length, self.device, self.block = list(stretches), length, device, block
        if any(stretch.start + stretch.length >= 1 << 31 for stretch in self.stretches):
            raise ValueError("a tensor of 2^31 elements or more cannot be rounded stochastically")

    @cached_property
    def table(self) -> torch.Tensor:
        """[stretches, 6] int64."""
        words = [stretch.words() for stretch in self.stretches]
        return torch.tensor(words, dtype=torch.int64).view(-1, 6).to(self.device)

    @cached_property
    def of_blocks(self) -> torch.Tensor:
        """[blocks, 2] int32: the first stretch that a block meets, and the one behind the last."""
        ends = torch.tensor([s.offset + s.length for s in self.stretches], dtype=torch.int64)
        begins = torch.tensor([s.offset for s in self.stretches], dtype=torch.int64)
        first = torch.arange(0, max(self.length, 1), self.block)
        met = [torch.searchsorted(ends, first, right=True), torch.searchsorted(begins, first + self.block)]
        return torch.stack(met, dim=1).to(torch.int32).to(self.device)


def random_bits(stretch: Stretch, step_key: int, device: torch.device, count: int = LOW_BITS) -> torch.Tensor:
    """int64 below 2^count, one for each element of a stretch; the upper bits of more are those of fewer."""
    place = torch.arange(stretch.start, stretch.start + stretch.length, device=device)
    index = (place // stretch.columns << 32) + place % stretch.columns + stretch.left
    return shift_right(scramble(index * signed(GOLDEN) + signed(stretch.key ^ step_key)), 64 - count)


def random_bytes(stretches: Stretches, step_key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 below 2^8 for each element of a shard, from other bits than weights are rounded with."""
    found = torch.zeros(stretches.length, dtype=torch.int32, device=stretches.device)
    for stretch in stretches.stretches:
        bits = random_bits(stretch, step_key, stretches.device, 2 * LOW_BITS) & 0xFFFF
        found[stretch.offset : stretch.offset + stretch.length] = bits.to(torch.int32)
    return found >> 8, found & 0xFF


def round_stochastically(wide: torch.Tensor, stretches: Stretches, step_key: int) -> torch.Tensor:
    """bf16 of a flat fp32 shard; elements in no stretch (padding) are cut off."""
    bits = wide.view(torch.int32).clone()
    for stretch in stretches.stretches:
        part = slice(stretch.offset, stretch.offset + stretch.length)
        bits[part] += random_bits(stretch, step_key, wide.device).to(torch.int32)
    return (bits & -(1 << LOW_BITS)).view(torch.float32).to(torch.bfloat16)
