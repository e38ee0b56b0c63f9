"""Bytes are those of the elements in order, whatever strides a tensor has."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.raw_bytes import as_bytes

GRID = torch.arange(12, dtype=torch.float32).view(3, 4)
TENSORS = {
    "whole": GRID,
    "one element with a stride": GRID[:, 1][:1],
    "a column": GRID[:, 1],
    "one row of a transpose": GRID.t()[:1],
    "a column of one": GRID[:1].t(),
    "a scalar": GRID[1, 2],
    "behind an offset": GRID[1:],
    "nothing": GRID[:0],
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes(name: str) -> None:
    x = TENSORS[name]
    assert bytes(as_bytes(x).numpy()) == x.numpy().tobytes()


def test_contiguous_memory_is_not_copied() -> None:
    x = torch.zeros(3, requires_grad=True)
    as_bytes(x)[0] = 1
    assert x[0] != 0
