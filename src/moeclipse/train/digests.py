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
"""Elements that are widened at a time: a digest needs a few MB, however large the tensor."""


def digest(values: torch.Tensor) -> torch.Tensor:
    """Of one contiguous tensor, as an int64 on its device."""
    return digest_rows(values.reshape(1, -1))[0]


def digest_rows(rows: torch.Tensor) -> torch.Tensor:
    """Of each row."""
    bits = rows.detach().view(BITS[rows.element_size()])
    found = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    odd = odd_numbers(CHUNK, rows.device)
    together = max(CHUNK // max(rows.shape[1], 1), 1)
    for top in range(0, len(rows), together):
        some = slice(top, top + together)
        for number, first in enumerate(range(0, rows.shape[1], CHUNK)):
            part = bits[some, first : first + CHUNK].to(torch.int64, copy=True)
            found[some] += part.mul_(odd[: part.shape[1]]).sum(1) * ((number * MIXER) % (1 << 62) * 2 + 1)
    return found


@functools.cache
def odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """One for each place of a chunk; made once: a small tensor would pay more for them than for its sum."""
    return (torch.arange(1, count + 1, device=device) * MIXER) | 1
