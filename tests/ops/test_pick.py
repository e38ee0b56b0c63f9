"""Numbers picked by index; an index of -1 is nobody."""

from __future__ import annotations

import torch

from moeclipse.ops.pick import pick


def test_picked_in_the_shape_of_the_index() -> None:
    values, index = torch.tensor([5.0, 6.0]), torch.tensor([[1, -1], [0, 0]], dtype=torch.int32)
    assert pick(values, index).tolist() == [[6, 0], [5, 5]]
    assert pick(values, index[:0]).shape == (0, 2)


def test_picked_in_another_type() -> None:
    values, index = torch.tensor([5.0, 6.0], dtype=torch.bfloat16), torch.tensor([1, -1])
    found = pick(values, index, torch.float32)
    assert found.dtype == torch.float32
    assert found.tolist() == [6, 0]
    assert pick(values, index).dtype == torch.bfloat16
    assert pick(values[:0], torch.full((2,), -1), torch.float32).dtype == torch.float32


def test_what_nobody_picks_may_be_anything() -> None:
    assert pick(torch.tensor([float("nan"), 2.0]), torch.tensor([-1, 1])).tolist() == [0, 2]


def test_where_there_is_nothing_nobody_picks() -> None:
    assert pick(torch.empty(0), torch.full((2, 3), -1)).equal(torch.zeros(2, 3))
