"""All experts of a layer in plain torch, against autograd through one expert after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.ops.combine import gather_sum, sum_rows
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference
from moeclipse.ops.grouping import group_arrived, group_counts, group_rows, rank_among_equals
from moeclipse.ops.topk_softmax import topk_softmax
from moeclipse.ops.wgrad import dense_wgrad, grouped_wgrad


def inputs(ids: torch.Tensor, num_experts: int, d: int = 6, f: int = 4) -> list[torch.Tensor]:
    shapes = [(len(ids), d), tuple(ids.shape), (num_experts, 2 * f, d), (num_experts, d, f)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_gradients_equal_autograd(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 5))
    num_tokens, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, num_experts))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    ids = torch.rand(num_tokens, num_experts).topk(top_k, 1).indices
    ids = torch.where(torch.rand(ids.shape) < data.draw(st.sampled_from([0.0, 0.4, 1.0])), -1, ids)
    tensors = inputs(ids, num_experts)
    x, scores, up, down = tensors
    ours = grouped_experts(x, scores, ids, up, down)
    exact = grouped_experts_reference(x, scores, ids, up, down)
    torch.testing.assert_close(ours, exact)
    d_out = torch.randn_like(ours)
    for got, expected in zip(
        torch.autograd.grad(ours, tensors, d_out), torch.autograd.grad(exact, tensors, d_out), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_weight_gradients_add_where_they_are_told() -> None:
    torch.manual_seed(0)
    ids = torch.rand(7, 3).topk(2, 1).indices
    tensors = inputs(ids, 3)
    x, scores, up, down = tensors
    d_out = torch.randn(7, 6, dtype=torch.float64)
    expected = torch.autograd.grad(grouped_experts_reference(x, scores, ids, up, down), (up, down), d_out)
    into = (torch.ones_like(up), torch.ones_like(down))
    for _ in range(2):
        grouped_experts(x, scores, ids, up, down, into=into).backward(d_out)
    assert up.grad is None
    for sums, gradient in zip(into, expected, strict=True):
        torch.testing.assert_close(sums, 1 + 2 * gradient)


def test_a_grouping_of_rows_that_arrived_in_order() -> None:
    grouping = group_counts(torch.tensor([2, 0, 3]), 5)
    assert grouping.offsets_E1.tolist() == [0, 2, 2, 5]
    assert group_rows(torch.tensor([[1, 0], [0, -1]]), 2).place_row_TK.tolist() == [[2, 0], [1, -1]]


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
    index_M = by_gate.row_token_M[:used].long()
    arrived = group_arrived(index_M, by_gate.counts_E.tolist(), 11, 3)
    assert arrived.offsets_E1.equal(by_gate.offsets_E1)
    assert arrived.row_token_M.equal(by_gate.row_token_M[:used])
    assert arrived.place_row_TK.sort(1).values.equal(by_gate.place_row_TK.sort(1).values)
    rows, weight = torch.randn(used, 5), torch.rand(used)
    expected = sum_rows(rows, index_M, 11, weight)
    torch.testing.assert_close(gather_sum(rows, arrived.place_row_TK, weight), expected)


def test_places_of_pairs_that_arrived() -> None:
    grouping = group_arrived(torch.tensor([0, 1, 0]), [2, 1], 3, 2)
    assert grouping.place_row_TK.tolist() == [[0, 2], [1, -1], [-1, -1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dense_wgrad_adds(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dy, x = torch.randn(9, 4).to(dtype), torch.randn(9, 3).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    into = torch.ones(4, 3, dtype=wide)
    dense_wgrad(dy, x, into)
    torch.testing.assert_close(into, 1 + dy.to(wide).t() @ x.to(wide))


def test_grouped_wgrad_overwrites_when_told() -> None:
    offsets = torch.tensor([0, 2, 2], dtype=torch.int32)
    dy, x, into = torch.ones(3, 2), torch.ones(3, 5), torch.full((2, 2, 5), 7.0)
    grouped_wgrad(dy, x, offsets, into, accumulate=False)
    assert into[0].eq(2).all()
    assert into[1].eq(0).all()


def test_the_gate_prefers_smaller_ids_among_equals() -> None:
    scores, ids = topk_softmax(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 2, 3]]
    torch.testing.assert_close(scores.sum(), torch.tensor(1.0))
