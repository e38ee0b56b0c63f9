"""NF4: matrices in 4 bits, with factors in 8, as bitsandbytes keeps them.

    number  = TABLE[code] factor                     16 quantiles of a normal distribution, from -1 to 1
    factor  = dynamic_map()[byte] scale + offset     of 64 numbers: the largest of them, nearly
    scale   of 256 factors, offset of an entry: the mean of its factors' exact values

Two codes lie in a byte, the first of them in its upper half. An entry is what is quantised on its own: one
matrix of a stack, unless `entries` says otherwise. 4.13 bits are kept of each number.

Contract. An entry has the bits that bitsandbytes 0.50 gives its numbers on a CPU (`quantize_4bit` with blocks
of 64 and compressed statistics, `dequantize_4bit`), on every device here. Where roundings could differ:

    codes        times 1 / largest, both in fp32; the last block divides where it is short; a tie goes down
    factors      less their mean, times 1 / largest, then to the nearest of 2^16 places between -1 and 1, and
                 only from there to the nearest byte; its kernels on CUDA go there at once
    factor       a product and then a sum, two roundings: not one fused operation
    types        bf16 and fp16 become fp32 first, and numbers are rounded once when they are decoded
    rows         that end inside a block: blocks go on in the next row. Its decoder for AVX-512 takes other
                 factors there than it was quantised with; this one does not

A tensor may come in pieces, in any order (`Pieces`): the bits are those of the whole.

Hazard. The mean is torch's on the CPU, and so is its order of summation: it follows the width of vector
registers, and of more than 2^15 factors the number of threads. Ranks that must hold the same bits of an entry
get its bytes from one that quantised it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch

from moeclipse.ops.quantised import CHUNK, TYPES, WARPS, WORDS, Quantised, fits, span_of

BLOCK, GROUP = 64, 256
"""Numbers that share a factor, and factors that share a scale."""
SMALLEST = 1e-38
"""What a block is divided by at least."""
PLACES = (1 << 16) - 1
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@dataclass(frozen=True, kw_only=True)
class Nf4(Quantised):
    """A stack of matrices; all of it lies one after the other."""

    codes: torch.Tensor
    """[numbers / 2] uint8."""
    factors: torch.Tensor
    """[blocks] uint8."""
    scales: torch.Tensor
    """[entries x groups] fp32: each entry begins a group."""
    offsets: torch.Tensor
    """[entries] fp32."""

    @property
    def blocks(self) -> int:
        """Of an entry."""
        return len(self.factors) // max(len(self.offsets), 1)

    def experts(self, first: int, stop: int) -> Nf4:
        before, count, shape = span_of(self.shape, first, stop)
        each, odd = divmod(len(self.offsets), self.num_matrices)
        if odd:
            raise ValueError(f"{len(self.offsets)} entries are not those of {self.num_matrices} matrices")
        part = slice(before * each, (before + count) * each)
        stacks = {name: tensor.view(len(self.offsets), -1)[part] for name, tensor in self.tensors.items()}
        kept: dict[str, Any] = {name: tensor.flatten() for name, tensor in stacks.items()}
        return replace(self, shape=shape, **kept)

    def factors_of(self, first: int, stop: int) -> torch.Tensor:
        """Of blocks [first, stop), in fp32."""
        block = torch.arange(first, stop, device=self.device)
        entry, place = block // self.blocks, block % self.blocks
        group = entry * -(-self.blocks // GROUP) + place // GROUP
        values = dynamic_map(self.device)[self.factors[first:stop].int()] * self.scales[group]
        return values + self.offsets[entry]

    def numbers(self, matrix: int, first: int, stop: int) -> torch.Tensor:
        height, width = self.shape[-2:]
        begin, end = (matrix * height + first) * width, (matrix * height + stop) * width
        packed = self.codes[begin // 2 : -(-end // 2)]
        codes = torch.stack([packed >> 4, packed & 0xF], dim=1).flatten()[begin % 2 :][: end - begin]
        block = begin // BLOCK
        factors = self.factors_of(block, -(-end // BLOCK)).repeat_interleave(BLOCK)
        factors = factors[begin - block * BLOCK : end - block * BLOCK]
        return (table(self.device)[codes.int()] * factors).view(stop - first, width)

    def launch(self, out: torch.Tensor, first: int) -> bool:
        count, (height, width) = out.shape[-2] * out.shape[-1], self.shape[-2:]
        if not fits(out) or count % BLOCK or first * width % BLOCK or height * width % BLOCK:
            return False
        from moeclipse.ops.triton import quantised as kernels

        spans, small = -(-count // (8 * WORDS)), BLOCK * self.blocks < 8 * WORDS
        kernels.decode_nf4[(self.num_matrices * spans,)](
            self.codes.view(torch.int32), self.factors, self.scales, self.offsets, table(out.device),
            dynamic_map(out.device), out, first * width, height * width, count, self.blocks,
            -(-self.blocks // GROUP), spans, GROUP=GROUP, SMALL=small, WORDS=WORDS, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
        return True


def quantise(values: torch.Tensor, entries: int | None = None) -> Nf4:
    """`entries`: how many parts of equal size are quantised on their own; by default each matrix is."""
    pieces = Pieces(tuple(values.shape), values.dtype, values.device, entries)
    pieces.write(values)
    return pieces.finish()


class Pieces:
    """A tensor that is quantised while it arrives; of the pieces themselves nothing is kept."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, entries: int | None = None
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.entries, self.length = prod(shape[:-2]) if entries is None else entries, prod(shape)
        if dtype not in TYPES or len(shape) < 2 or self.length == 0:
            raise ValueError(f"nf4 keeps matrices of bf16, fp16 or fp32, not {list(shape)} of {dtype}")
        if self.entries > 1 and self.length % (self.entries * BLOCK):
            raise ValueError(f"{self.entries} entries of {list(shape)} are not whole blocks of {BLOCK}")
        self.codes = torch.empty(-(-self.length // 2), dtype=torch.uint8, device=device)
        self.largest = torch.full((-(-self.length // BLOCK),), torch.nan, dtype=torch.float32, device=device)

    def write(self, values: torch.Tensor, at: int = 0) -> None:
        """Numbers from place `at` of the flat tensor on; whole blocks, unless they are the last."""
        flat = values.detach().to(self.device).reshape(-1)
        stop = at + len(flat)
        if at % BLOCK or stop > self.length or (stop % BLOCK and stop < self.length):
            raise ValueError(
                f"numbers {at} to {stop} of {self.length} are not whole blocks of {BLOCK}; cut elsewhere"
            )
        if values.dtype != self.dtype:
            raise ValueError(f"a piece is {values.dtype}, but the tensor {self.dtype}")
        for first in range(0, len(flat), CHUNK):
            part = flat[first : first + CHUNK].float()
            place = at + first
            codes, largest = codes_of(part)
            self.codes[place // 2 : place // 2 + len(codes)] = codes
            self.largest[place // BLOCK : place // BLOCK + len(largest)] = largest

    def finish(self) -> Nf4:
        largest = self.largest.view(self.entries, -1)
        if not largest.isfinite().all():
            raise ValueError("what is quantised has NaN or infinity in it, or a piece was not written")
        factors, scales, offsets = quantise_factors(largest)
        kept = {"codes": self.codes, "factors": factors, "scales": scales, "offsets": offsets}
        return Nf4(shape=self.shape, dtype=self.dtype, **kept)


def codes_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of flat fp32 numbers: two codes in each byte, and the largest size in each block."""
    whole = len(values) // BLOCK * BLOCK
    blocks, rest = values[:whole].view(-1, BLOCK), values[whole:]
    largest = blocks.abs().amax(1)
    scaled = (blocks * (1 / largest.clamp(min=SMALLEST))[:, None]).flatten()
    if len(rest):
        last = rest.abs().amax().clamp(min=SMALLEST)
        largest, scaled = torch.cat([largest, last[None]]), torch.cat([scaled, rest / last])
    bounds = midpoints(table(values.device))
    codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
    if len(codes) % 2:
        # What stands in the half of a byte that has no number: the code of zero.
        codes = torch.cat([codes, torch.full_like(codes[:1], TABLE.index(0.0))])
    return codes[::2] << 4 | codes[1::2], largest


def quantise_factors(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of exact factors [entries, blocks]: bytes, scales and offsets, each flat."""
    # Each entry's own, on a CPU: that is whose order of summation the bits have.
    offsets = torch.stack([entry.mean() for entry in largest.cpu()]).to(largest.device)
    padded = torch.nn.functional.pad(largest - offsets[:, None], (0, -largest.shape[1] % GROUP))
    groups = padded.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1)
    # 0 times infinity: a group whose factors are all the mean has bytes 0.
    scaled = (groups * (1 / scales)[..., None]).clamp(-1, 1).nan_to_num(nan=-1.0)
    # In float64 the product and the sum are exact: as one fused operation of fp32 would round them.
    place = (((scaled + 1) * 0.5).double() * PLACES + 0.5).float().trunc()
    bounds = midpoints(dynamic_map(largest.device))
    codes = torch.bucketize(2 * place / PLACES - 1, bounds, out_int32=True).flatten(1)
    return codes[:, : largest.shape[1]].to(torch.uint8).flatten(), scales.flatten(), offsets


def midpoints(sorted_values: torch.Tensor) -> torch.Tensor:
    return (sorted_values[:-1] + sorted_values[1:]) / 2


@cache
def table(device: torch.device) -> torch.Tensor:
    return torch.tensor(TABLE, dtype=torch.float32, device=device)


@cache
def dynamic_map(device: torch.device) -> torch.Tensor:
    """256 numbers: 0, 1, and +-10^(i - 6) times the middles of 2^i equal parts of [0.1, 1], i from 0 to 6."""
    with torch.device("cpu"):
        start = torch.tensor(0.1, dtype=torch.float32).double()
        sizes = []
        for i in range(7):
            count = 1 << i
            step, place = ((1 - start).float() / count).double(), torch.arange(count + 1)
            # From either end to the middle: a product and a sum with one rounding.
            edges = torch.where(2 * place < count, start + step * place, 1 - step * (count - place)).float()
            sizes.append(torch.tensor(10.0 ** (i - 6), dtype=torch.float32) * midpoints(edges))
        size = torch.cat(sizes)
        return torch.cat([-size, torch.tensor([0, 1]), size]).sort().values.to(device)
