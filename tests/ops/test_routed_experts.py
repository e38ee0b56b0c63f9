"""The routed part of a layer in plain torch, against autograd through one expert after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.ops.combine import gather_sum, sum_rows
from moeclipse.ops.routed_experts import routed_experts, routed_experts_reference
from moeclipse.ops.routing_metadata import group_counts, group_rows, places_of
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
    ours = routed_experts(x, scores, ids, up, down)
    exact = routed_experts_reference(x, scores, ids, up, down)
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
    expected = torch.autograd.grad(routed_experts_reference(x, scores, ids, up, down), (up, down), d_out)
    into = (torch.ones_like(up), torch.ones_like(down))
    for _ in range(2):
        routed_experts(x, scores, ids, up, down, into=into).backward(d_out)
    assert up.grad is None
    for sums, gradient in zip(into, expected, strict=True):
        torch.testing.assert_close(sums, 1 + 2 * gradient)


def test_a_grouping_of_rows_that_arrived_in_order() -> None:
    grouping = group_counts(torch.tensor([2, 0, 3]), 5)
    assert grouping.offsets_E1.tolist() == [0, 2, 2, 5]
    assert group_rows(torch.tensor([[1, 0], [0, -1]]), 2).place_row_TK.tolist() == [[2, 0], [1, -1]]


def test_the_inverse_of_an_index_sums_the_same_rows() -> None:
    torch.manual_seed(0)
    ids = torch.rand(11, 4).topk(3, 1).indices
    ids[::3, 2] = -1
    grouping = group_rows(ids, 4)
    used = int(grouping.offsets_E1[-1])
    index_M, rows, weight = grouping.row_token_M, torch.randn(33, 5), torch.rand(33)
    places = places_of(index_M, grouping, 11)
    expected = sum_rows(rows[:used], index_M[:used].long(), 11, weight[:used])
    torch.testing.assert_close(gather_sum(rows, places, weight), expected)
    assert (places >= 0).sum() == used


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
