"""A number for the bits of a tensor: equal where the bits are, and another one after any single flip.

    digest = sum over chunks c, places i of  bits[c, i] * odd(i) * odd(c)        modulo 2^64

A flipped bit changes the sum by a power of two below 2^64 times an odd number, which is never a multiple of
2^64. It guards against faults, not against somebody who looks for collisions.
"""

from __future__ import annotations

import functools

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MIXER = 0x9E3779B97F4A7C15 - (1 << 64)
CHUNK = 1 << 20
"""Elements of a chunk; so many are widened at a time: a digest needs a few MB, however large the tensor."""
CHUNKS_ON_DEVICE = 32
"""On a GPU so many chunks at a time: what one takes there is mostly the launch of its kernels."""


def digest(values: torch.Tensor) -> torch.Tensor:
    """Of one contiguous tensor, as an int64 on its device."""
    return digest_rows(values.reshape(1, -1))[0]


def digest_rows(rows: torch.Tensor) -> torch.Tensor:
    """Of each row."""
    bits = rows.detach().view(BITS[rows.element_size()])
    found = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    odd, num_columns = odd_numbers(CHUNK, rows.device), rows.shape[1]
    most = chunks_at_once(rows.device)
    together = max(most * CHUNK // max(num_columns, 1), 1)
    for top in range(0, len(rows), together):
        some, first = slice(top, top + together), 0
        while first < num_columns:
            count = min(most, max((num_columns - first) // CHUNK, 1))
            part = bits[some, first : first + count * CHUNK].to(torch.int64, copy=True)
            part = part.view(len(part), count, -1)
            sums = part.mul_(odd[: part.shape[2]]).sum(2)
            found[some] += (sums * of_chunks(first // CHUNK, count, rows.device)).sum(1)
            first += count * CHUNK
    return found


def chunks_at_once(device: torch.device) -> int:
    return CHUNKS_ON_DEVICE if device.type == "cuda" else 1


def of_chunks(first: int, count: int, device: torch.device) -> torch.Tensor:
    """An odd number for each of some chunks."""
    numbers = torch.arange(first, first + count, device=device)
    return (numbers * MIXER & ((1 << 62) - 1)) * 2 + 1


@functools.cache
def odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """One for each place of a chunk; made once: a small tensor would pay more for them than for its sum."""
    return (torch.arange(1, count + 1, device=device) * MIXER) | 1
