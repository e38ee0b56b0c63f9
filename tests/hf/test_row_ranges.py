"""Where rows of a logical tensor lie."""

from __future__ import annotations

import torch

from moeclipse.hf.row_ranges import RowRange, renamed, taking_turns, whole


def test_rows_that_take_turns_are_read_head_by_head() -> None:
    theirs = torch.arange(12 * 2).view(12, 2)
    second = taking_turns("key", (12, 2), 1, 2, 6, 2)
    assert second.shape == (4, 2)
    found = torch.cat([theirs[part.first : part.first + part.rows] for part in second.parts])
    assert found[:, 0].tolist() == [2, 4, 14, 16]


def test_dimensions_of_one_are_looked_through() -> None:
    conv = RowRange(key="conv", shape=(6, 1, 4), rows=6, around=(0, 1))
    assert torch.zeros(conv.shape)[conv.index(slice(2, 5), slice(None))].shape == (3, 4)
    rate = RowRange(key="rate", shape=(1, 1, 6, 1), rows=6, around=(2, 1))
    assert torch.zeros(rate.shape)[rate.index(slice(2, 5), None)].shape == (3,)
    stack = RowRange(key="stack", shape=(3, 5, 6), rows=6, entry=1, transposed=True)
    assert torch.zeros(stack.shape)[stack.index(slice(0, 6), slice(1, 3))].shape == (2, 6)


def test_other_words() -> None:
    tensor = renamed(whole("model.mlp.down.weight", 2, 3), ((".mlp.", ".feed_forward."), ("down", "w2")))
    assert tensor.parts[0].key == "model.feed_forward.w2.weight"
