"""Which parts of the tensors in a Hugging Face folder make up a logical tensor of ours.

Idea. A `RowRange` says where some rows of a logical tensor lie: in which tensor, of which entry of a stack,
from which row on, every how many rows, and whether rows are columns there. All families are made of such
parts, and a table of parts is read in both directions.

Contract. Parts of one logical tensor cover its rows in order; parts that name one tensor cover it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Some rows of a logical tensor, as they lie in a tensor of a folder."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor in the folder."""
    rows: int
    entry: int | None = None
    """Its entry of a stack."""
    first: int = 0
    step: int = 1
    transposed: bool = False
    around: tuple[int, int] = (0, 0)
    """Dimensions of one that the tensor has before its rows, and right behind them."""

    def index(self, rows: slice, columns: slice | None) -> tuple[Any, ...]:
        """Of some rows and columns in it; a vector has no columns."""
        before, behind = self.around
        entry = () if self.entry is None else (self.entry,)
        across = () if columns is None else (columns,)
        where = (*across, rows) if self.transposed else (rows, *[0] * behind, *across)
        return (*[0] * before, *entry, *where)


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """A tensor of ours: its shape, and where its rows are."""

    shape: tuple[int, ...]
    parts: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1] or self.shape)

    @property
    def width(self) -> int:
        """Elements of a row; a vector has rows of one."""
        return self.shape[-1] if len(self.shape) > 1 else 1


def whole(key: str, *shape: int) -> LogicalTensor:
    rows = prod(shape[:-1] or shape)
    return LogicalTensor(shape=shape, parts=(RowRange(key=key, shape=shape, rows=rows),))


def under_each_other(keys: tuple[str, ...], rows: int, width: int, *, stack: bool = False) -> LogicalTensor:
    """Matrices of `rows` each; `stack`: ours is a stack of one."""
    parts = tuple(RowRange(key=key, shape=(rows, width), rows=rows) for key in keys)
    shape = (len(keys) * rows, width)
    return LogicalTensor(shape=(1, *shape) if stack else shape, parts=parts)


def taking_turns(
    key: str, shape: tuple[int, ...], first: int, rows: int, stride: int, times: int
) -> LogicalTensor:
    """So many rows from each `stride` of a matrix, from `first` on: parts that take turns, head by head."""
    parts = tuple(RowRange(key=key, shape=shape, rows=rows, first=first + n * stride) for n in range(times))
    return LogicalTensor(shape=(times * rows, *shape[1:]), parts=parts)


def renamed(tensor: LogicalTensor, words: tuple[tuple[str, str], ...]) -> LogicalTensor:
    """With keys in which some words are others."""

    def other(key: str) -> str:
        for ours, theirs in words:
            key = key.replace(ours, theirs)
        return key

    parts = tuple(replace(part, key=other(part.key)) for part in tensor.parts)
    return replace(tensor, parts=parts)


Named = Iterator[tuple[str, LogicalTensor]]
"""By the names that checkpoints have for parameters."""
