"""Matrices that are stored by columns.

Idea. A checkpoint holds ranges of flattened tensors. A rank that has some columns of a matrix has no such
range, so it stores its columns as a matrix of their own, a column shard, named after the logical one:
`NAME[:, 32:64]`. The shards of a matrix cover its columns, in any number of parts.

Contract. Readers ask for the logical matrix, or for any column shard of it, and get it from whatever was
stored: the matrix itself, or other shards. Only the rows that hold the elements asked for are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

SLAB = re.compile(r"(?P<name>.*)\[:, (?P<first>\d+):(?P<stop>\d+)\]")

Read = Callable[[str, int, int], torch.Tensor]


@dataclass(frozen=True, order=True)
class ColumnShard:
    """Columns first .. stop - 1 of the matrix `name`."""

    name: str
    first: int
    stop: int

    @classmethod
    def parse(cls, key: str) -> ColumnShard | None:
        found = SLAB.fullmatch(key)
        return cls(found["name"], int(found["first"]), int(found["stop"])) if found else None

    @property
    def key(self) -> str:
        return f"{self.name}[:, {self.first}:{self.stop}]"

    @property
    def width(self) -> int:
        return self.stop - self.first


def by_matrix(keys: Iterable[str]) -> dict[str, list[ColumnShard]]:
    """The column shards among `keys`, for each matrix from left to right."""
    found: dict[str, list[ColumnShard]] = {}
    for key in keys:
        column_shard = ColumnShard.parse(key)
        if column_shard is not None:
            found.setdefault(column_shard.name, []).append(column_shard)
    return {name: sorted(column_shards) for name, column_shards in found.items()}


def are_whole(column_shards: list[ColumnShard]) -> bool:
    """Whether they cover columns 0 .. width, each once."""
    return [column_shard.first for column_shard in column_shards] == [
        0,
        *(column_shard.stop for column_shard in column_shards[:-1]),
    ]


def read_columns(
    read: Read, stored: list[ColumnShard], wanted: ColumnShard, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """Elements [start, stop) of the flattened `wanted`, from column shards that cover its matrix."""
    first_row, last_row = start // wanted.width, -(-stop // wanted.width)
    rows = torch.empty(last_row - first_row, wanted.width, dtype=dtype)
    for column_shard in stored:
        left, right = max(column_shard.first, wanted.first), min(column_shard.stop, wanted.stop)
        if left < right:
            part = read(column_shard.key, first_row * column_shard.width, last_row * column_shard.width).view(
                -1, column_shard.width
            )
            rows[:, left - wanted.first : right - wanted.first] = part[
                :, left - column_shard.first : right - column_shard.first
            ]
    offset = first_row * wanted.width
    return rows.view(-1)[start - offset : stop - offset]
