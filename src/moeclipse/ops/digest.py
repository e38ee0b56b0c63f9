"""A number for the bits of a tensor: equal where the bits are, and another one after any single flip.

    digest = sum over chunks c, places i of  bits[c, i] * odd(i) * odd(c)        modulo 2^64

A flipped bit changes the sum by a power of two below 2^64 times an odd number, which is never a multiple of
2^64. It guards against faults, not against somebody who looks for collisions. Sums of whole numbers have no
order: the kernel gives the number of the reference, in one read.
"""

from __future__ import annotations

import functools

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MIXER = 0x9E3779B97F4A7C15 - (1 << 64)
CHUNK = 1 << 20
"""Elements of a chunk; so many are widened at a time: a digest needs a few MB, however large the tensor."""
SPAN, BLOCK = 1 << 15, 1 << 12
"""Of the kernel: elements of a program, which lie in one chunk, and those that it holds at once."""


def digest(values: torch.Tensor) -> torch.Tensor:
    """Of one contiguous tensor, as an int64 on its device."""
    return digest_rows(values.reshape(1, -1))[0]


def digest_rows(rows: torch.Tensor) -> torch.Tensor:
    """Of each row."""
    fits = rows.is_cuda and rows.numel() > 0
    return (digest_rows_kernel if fits else digest_rows_reference)(rows.detach())


def digest_rows_reference(rows: torch.Tensor) -> torch.Tensor:
    bits = rows.view(BITS[rows.element_size()])
    found = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    odd, num_columns = odd_numbers(CHUNK, rows.device), rows.shape[1]
    together = max(CHUNK // max(num_columns, 1), 1)
    for top in range(0, len(rows), together):
        some = slice(top, top + together)
        for first in range(0, num_columns, CHUNK):
            part = bits[some, first : first + CHUNK].to(torch.int64, copy=True)
            found[some] += part.mul_(odd[: part.shape[1]]).sum(1) * odd_of_chunk(first // CHUNK)
    return found


def digest_rows_kernel(rows: torch.Tensor, *, chunk: int = CHUNK, span: int = SPAN) -> torch.Tensor:
    """`span` divides `chunk`."""
    from moeclipse.ops.triton import digest as kernels

    bits = rows.contiguous().view(BITS[rows.element_size()])
    (num_rows, num_columns), spans = bits.shape, -(-bits.shape[1] // span)
    parts = torch.empty(num_rows, spans, dtype=torch.int64, device=rows.device)
    kernels.digest_span[(num_rows * spans,)](
        bits, parts, num_columns, spans, MIXER=MIXER, CHUNK=chunk, SPAN=span, BLOCK=min(BLOCK, span)
    )
    return parts.sum(1)


def odd_of_chunk(chunk: int) -> int:
    """As an int64 that is not negative."""
    return (chunk * MIXER & ((1 << 62) - 1)) * 2 + 1


@functools.cache
def odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """One for each place of a chunk; made once: a small tensor would pay more for them than for its sum."""
    return (torch.arange(1, count + 1, device=device) * MIXER) | 1
