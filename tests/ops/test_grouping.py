"""Rows grouped by expert: by sorting, by counting, and as they arrived."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted import assert_equal_references

from moeclipse.ops.combine import gather_sum, sum_rows
from moeclipse.ops.grouping import (
    ROW_TILE,
    group_arrived,
    group_counts,
    group_rows,
    rank_among_equals,
    tile_capacity,
)


def test_the_example_of_the_file() -> None:
    grouping = group_rows(torch.tensor([[1, 0], [0, -1]]), 2)
    assert grouping.counts_E.tolist() == [2, 1]
    assert grouping.offsets_E1.tolist() == [0, 2, 3]
    assert grouping.row_token_M is not None
    assert grouping.row_token_M.tolist() == [0, 1, 0, 0], "the last one is not in use"
    assert grouping.row_place_M is not None
    assert grouping.row_place_M.tolist() == [1, 2, 0, 0]
    assert grouping.place_row_TK is not None
    assert grouping.place_row_TK.tolist() == [[2, 0], [1, -1]]


@given(st.lists(st.lists(st.integers(-1, 4), min_size=3, max_size=3), max_size=12))
def test_every_used_pair_has_a_row_of_its_expert(ids: list[list[int]]) -> None:
    table = torch.tensor(ids, dtype=torch.int64).view(-1, 3)
    grouping = group_rows(table, 5)
    place, offsets = grouping.place_row_TK, grouping.offsets_E1.tolist()
    assert place is not None
    rows = []
    for token, (chosen, places) in enumerate(zip(table.tolist(), place.tolist(), strict=True)):
        for expert, row in zip(chosen, places, strict=True):
            assert (row >= 0) is (expert >= 0)
            if row >= 0:
                assert offsets[expert] <= row < offsets[expert + 1]
                assert grouping.row_token_M is not None
                assert grouping.row_token_M[row] == token
                rows.append(row)
    assert sorted(rows) == list(range(offsets[-1]))


def test_a_grouping_of_rows_that_arrived_in_order() -> None:
    grouping = group_counts(torch.tensor([2, 0, 3]), 5)
    assert grouping.offsets_E1.tolist() == [0, 2, 2, 5]


@given(st.lists(st.integers(-1, 4), max_size=40))
def test_rank_among_equals(ids: list[int]) -> None:
    expected = [ids[:i].count(value) for i, value in enumerate(ids)]
    assert rank_among_equals(torch.tensor(ids, dtype=torch.int64)).tolist() == expected


def test_pairs_that_arrived_are_grouped_as_those_of_a_gate() -> None:
    torch.manual_seed(0)
    ids = torch.rand(11, 4).topk(3, 1).indices
    ids[::3, 2] = -1
    by_gate = group_rows(ids, 4)
    used = int(by_gate.offsets_E1[-1])
    assert by_gate.row_token_M is not None
    assert by_gate.place_row_TK is not None
    index_M = by_gate.row_token_M[:used].long()
    arrived = group_arrived(index_M, by_gate.counts_E.tolist(), 11, 3)
    assert arrived.offsets_E1.equal(by_gate.offsets_E1)
    assert arrived.row_token_M is not None
    assert arrived.row_token_M.equal(by_gate.row_token_M[:used])
    assert arrived.place_row_TK is not None
    assert arrived.place_row_TK.sort(1).values.equal(by_gate.place_row_TK.sort(1).values)
    rows, weight = torch.randn(used, 5), torch.rand(used)
    expected = sum_rows(rows, index_M, 11, weight)
    torch.testing.assert_close(gather_sum(rows, arrived.place_row_TK, weight), expected)


def test_places_of_pairs_that_arrived() -> None:
    grouping = group_arrived(torch.tensor([0, 1, 0]), [2, 1], 3, 2)
    assert grouping.place_row_TK is not None
    assert grouping.place_row_TK.tolist() == [[0, 2], [1, -1], [-1, -1]]


def test_there_is_room_for_a_part_of_a_tile_of_each_expert() -> None:
    for counts in ([1, 1, 1], [ROW_TILE, 0, 0], [ROW_TILE + 1, ROW_TILE - 1, 3]):
        tiles = sum(-(-count // ROW_TILE) for count in counts)
        assert tiles <= tile_capacity(sum(counts), len(counts))


def test_counting_equals_sorting() -> None:
    assert_equal_references("grouping", "grouping uniform", "grouping unused")


def test_few_pairs_are_grouped_as_many_are() -> None:
    assert_equal_references("grouping", "few uniform", "few unused", "few one takes all", "few twice")
