"""Frozen matrices in few bits: what all ways of keeping them have in common.

    class Nf4(Quantised)        4 bits, quantised here (`ops/nf4`)
    class Mxfp4, Fp8Blocks      4 and 8 bits, as folders have them (`ops/block_floats`)

A Quantised of shape [..., R, C] is a stack of matrices R x C, or one of them. Whoever computes with it asks
for the numbers, in a buffer of their own where there is one:

    weight = frozen.decode()                           all of it, in `frozen.dtype`
    frozen.experts(i, j).decode(scratch)               matrices i to j; experts() copies nothing
    frozen.decode(rows=slice(0, 64))                   some rows of each matrix

Contract. Numbers are made in float32, one product each, and rounded once to the type that is asked for. Any
part has the bits that it has in the whole, and kernels give those of the reference. Decoded weights have no
gradient: a product with them gives gradients of the other operand, those that the decoded numbers have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Self

import torch

TYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK = 1 << 20
"""Elements that the references decode at a time: they take some 20 bytes for each of them."""
WORDS, WARPS = 512, 2
"""Words of eight numbers that a program of the kernels for 4 bits has."""


@dataclass(frozen=True, kw_only=True)
class Quantised(ABC):
    """Of a subclass the fields that are tensors are what it keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def experts(self, first: int, stop: int) -> Self:
        """Matrices [first, stop) of a stack, in the same memory."""

    @abstractmethod
    def numbers(self, matrix: int, first: int, stop: int) -> torch.Tensor:
        """Rows [first, stop) of one matrix in float32, by plain torch: the reference."""

    @abstractmethod
    def launch(self, out: torch.Tensor, first: int) -> bool:
        """Write rows from `first` on of each matrix by a kernel; False where it does not take them."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in kept.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """That are kept."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def num_matrices(self) -> int:
        return prod(self.shape[:-2])

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, **moved)

    def decode(self, into: torch.Tensor | None = None, rows: slice = slice(None)) -> torch.Tensor:
        """[..., rows, C], in the type and memory of `into` where that is given."""
        first, stop, step = rows.indices(self.shape[-2])
        shape = (*self.shape[:-2], max(stop - first, 0), self.shape[-1])
        if step != 1:
            raise ValueError(f"rows are decoded one after the other, but the step is {step}")
        if into is None:
            into = torch.empty(shape, dtype=self.dtype, device=self.device)
        if (tuple(into.shape), into.device) != (shape, self.device):
            raise ValueError(
                f"into is {list(into.shape)} on {into.device}, but what is decoded is {list(shape)} on "
                f"{self.device}"
            )
        with torch.no_grad():
            if not (into.is_cuda and into.numel() and self.launch(into, first)):
                self.decode_reference(into, first)
        return into

    def decode_reference(self, out: torch.Tensor, first: int) -> None:
        height, step = out.shape[-2], max(CHUNK // self.shape[-1], 1)
        for matrix, part in enumerate(out.view(self.num_matrices, *out.shape[-2:])):
            for row in range(0, height, step):
                some = part[row : row + step]
                some.copy_(self.numbers(matrix, first + row, first + row + len(some)))


def span_of(shape: tuple[int, ...], first: int, stop: int) -> tuple[int, int, tuple[int, ...]]:
    """Of matrices [first, stop) of a stack: the first of its matrices, how many, and their shape."""
    if len(shape) < 3 or not 0 <= first <= stop <= shape[0]:
        raise ValueError(f"[{first}, {stop}) are not matrices of a stack of shape {list(shape)}")
    each = prod(shape[1:-2])
    return first * each, (stop - first) * each, (stop - first, *shape[1:])


def fits(out: torch.Tensor) -> bool:
    """What the kernels write: these types, without gaps, in matrices whose numbers 32 bits can count."""
    sized = out.shape[-2] * out.shape[-1] < (1 << 31) - CHUNK
    return out.dtype in TYPES and out.is_contiguous() and sized and out.data_ptr() % 16 == 0
