"""Causal convolutions of channels: whole, in documents, and piece by piece."""

from __future__ import annotations

import torch

from moeclipse.ops.attention import restarting_positions
from moeclipse.ops.short_conv import last_inputs, short_conv
from moeclipse.testing.compare import difference

X = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_it_is_the_sum_that_it_says() -> None:
    y = short_conv(X, WEIGHT)
    by_hand = WEIGHT[:, 2] * X[:, 4] + WEIGHT[:, 1] * X[:, 3] + WEIGHT[:, 0] * X[:, 2]
    assert difference(y[:, 4], by_hand) < 1e-14
    assert difference(y[:, 0], WEIGHT[:, 2] * X[:, 0]) < 1e-14


def test_documents_begin_anew() -> None:
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [4, 5, 5, 5, 5, 5, 6]])
    y = short_conv(X, WEIGHT, place_BS=restarting_positions(documents))
    assert difference(y[:1, 3:], short_conv(X[:1, 3:], WEIGHT)) < 1e-14
    assert difference(y[1:, 1:6], short_conv(X[1:, 1:6], WEIGHT)) < 1e-14


def test_piece_by_piece_with_rows_of_unequal_length() -> None:
    """Row 0 has three new inputs, row 1 has one, and what stands behind it is padding."""
    whole = short_conv(X, WEIGHT)
    before = last_inputs(X[:, :3], None, 2, torch.tensor([3, 1]))
    assert before[1].equal(torch.stack([torch.zeros(5, dtype=torch.float64), X[1, 0]]))
    rest = torch.stack([X[0, 3:6], X[1, 1:4]])
    y = short_conv(rest, WEIGHT, before_BPC=before)
    assert difference(y[0], whole[0, 3:6]) < 1e-14
    assert difference(y[1], whole[1, 1:4]) < 1e-14
    assert last_inputs(rest, before, 2, torch.tensor([0, 1]))[0].equal(before[0])
