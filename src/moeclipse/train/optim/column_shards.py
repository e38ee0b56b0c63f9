"""Matrices that are stored by columns.

Idea. A checkpoint holds ranges of flattened tensors. A rank that has some columns of a matrix has no such
range, so it stores its columns as a matrix of their own, a slab, named after the logical one: `NAME[:,
32:64]`. The slabs of a matrix cover its columns, in any number of parts.

Contract. Readers ask for the logical matrix, or for any slab of it, and get it from whatever was stored: the
matrix itself, or other slabs. Only the rows that hold the elements asked for are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

SLAB = re.compile(r"(?P<name>.*)\[:, (?P<first>\d+):(?P<stop>\d+)\]")

Read = Callable[[str, int, int], torch.Tensor]


@dataclass(frozen=True, order=True)
class Slab:
    """Columns first .. stop - 1 of the matrix `name`."""

    name: str
    first: int
    stop: int

    @classmethod
    def parse(cls, key: str) -> Slab | None:
        found = SLAB.fullmatch(key)
        return cls(found["name"], int(found["first"]), int(found["stop"])) if found else None

    @property
    def key(self) -> str:
        return f"{self.name}[:, {self.first}:{self.stop}]"

    @property
    def width(self) -> int:
        return self.stop - self.first


def by_matrix(keys: Iterable[str]) -> dict[str, list[Slab]]:
    """The slabs among `keys`, for each matrix from left to right."""
    found: dict[str, list[Slab]] = {}
    for key in keys:
        slab = Slab.parse(key)
        if slab is not None:
            found.setdefault(slab.name, []).append(slab)
    return {name: sorted(slabs) for name, slabs in found.items()}


def are_whole(slabs: list[Slab]) -> bool:
    """Whether they cover columns 0 .. width, each once."""
    return [slab.first for slab in slabs] == [0, *(slab.stop for slab in slabs[:-1])]


def read_columns(
    read: Read, stored: list[Slab], wanted: Slab, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """Elements [start, stop) of the flattened slab `wanted`, from slabs that cover its matrix."""
    first_row, last_row = start // wanted.width, -(-stop // wanted.width)
    rows = torch.empty(last_row - first_row, wanted.width, dtype=dtype)
    for slab in stored:
        left, right = max(slab.first, wanted.first), min(slab.stop, wanted.stop)
        if left < right:
            part = read(slab.key, first_row * slab.width, last_row * slab.width).view(-1, slab.width)
            rows[:, left - wanted.first : right - wanted.first] = part[
                :, left - slab.first : right - slab.first
            ]
    offset = first_row * wanted.width
    return rows.view(-1)[start - offset : stop - offset]
