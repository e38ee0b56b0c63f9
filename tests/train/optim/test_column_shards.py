"""Matrices stored by columns: any cut is read as the whole, or as any other cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.train.optim.column_shards import ColumnShard, are_whole, by_matrix, read_columns


def test_a_slab_is_named_after_its_matrix() -> None:
    column_shard = ColumnShard("layers.0.w", 32, 64)
    assert (column_shard.key, column_shard.width) == ("layers.0.w[:, 32:64]", 32)
    assert ColumnShard.parse(column_shard.key) == column_shard
    assert ColumnShard.parse("layers.0.w") is None
    assert ColumnShard.parse("layers.0.w[32:64]") is None, "a range of elements is no column_shard"


def test_slabs_are_found_among_other_tensors() -> None:
    keys = ["b[:, 2:4]", "a", "b[:, 0:2]", "c[:, 0:9]", "b[:, 10:12]"]
    assert by_matrix(keys) == {
        "b": [ColumnShard("b", 0, 2), ColumnShard("b", 2, 4), ColumnShard("b", 10, 12)],
        "c": [ColumnShard("c", 0, 9)],
    }


@pytest.mark.parametrize(
    ("bounds", "whole"),
    [([(0, 2), (2, 5)], True), ([(0, 5)], True), ([(0, 2), (3, 5)], False), ([(1, 5)], False)],
)
def test_columns_that_are_missing_are_noticed(bounds: list[tuple[int, int]], whole: bool) -> None:
    assert are_whole([ColumnShard("w", first, stop) for first, stop in bounds]) is whole
    assert not are_whole([ColumnShard("w", 0, 3), ColumnShard("w", 2, 5)]), "given twice"


@given(st.data())
def test_any_part_is_read_from_any_cut(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    matrix = torch.arange(rows * width).view(rows, width)
    cuts = sorted(data.draw(st.sets(st.integers(1, width), max_size=4)) | {0, width})
    stored = [ColumnShard("w", first, stop) for first, stop in pairwise(cuts)]
    first = data.draw(st.integers(0, width - 1))
    wanted = ColumnShard("w", first, data.draw(st.integers(first + 1, width)))
    start = data.draw(st.integers(0, rows * wanted.width))
    stop = data.draw(st.integers(start, rows * wanted.width))
    read_elements = 0

    def read(key: str, begin: int, end: int) -> torch.Tensor:
        nonlocal read_elements
        column_shard = ColumnShard.parse(key)
        assert column_shard in stored
        read_elements += end - begin
        return matrix[:, column_shard.first : column_shard.stop].flatten()[begin:end]

    found = read_columns(read, stored, wanted, start, stop, torch.int64)
    assert torch.equal(found, matrix[:, wanted.first : wanted.stop].flatten()[start:stop])
    touched = -(-stop // wanted.width) - start // wanted.width
    assert read_elements <= touched * width, "only the rows that hold the elements are read"
