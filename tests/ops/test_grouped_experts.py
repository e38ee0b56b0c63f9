"""All experts of a layer in plain torch, against autograd through one expert after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apart import apart
from moeclipse.ops.activation import ACTIVATIONS, hidden_width
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference


def inputs(ids: torch.Tensor, num_experts: int, d: int = 6, f: int = 4) -> list[torch.Tensor]:
    shapes = [(len(ids), d), tuple(ids.shape), (num_experts, 2 * f, d), (num_experts, d, f)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_gradients_equal_autograd(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 5))
    num_tokens, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, num_experts))
    unused, seed = data.draw(st.sampled_from([0.0, 0.4, 1.0])), data.draw(st.integers(0, 99))
    compare(num_experts, num_tokens, top_k, unused, seed)


@apart
def compare(num_experts: int, num_tokens: int, top_k: int, unused: float, seed: int) -> None:
    torch.manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts).topk(top_k, 1).indices
    ids = torch.where(torch.rand(ids.shape) < unused, -1, ids)
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


@apart
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


@pytest.mark.parametrize("activation", ACTIVATIONS)
@apart
def test_biases_and_their_sums(activation: str) -> None:
    torch.manual_seed(0)
    ids, h = torch.rand(7, 3).topk(2, 1).indices, hidden_width(activation, 4)
    shapes = [(7, 6), (7, 2), (3, h, 6), (3, 6, 4), (3, h), (3, 6)]
    tensors = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    x, scores, *weights = tensors
    expected = grouped_experts_reference(x, scores, ids, *weights, activation=activation)
    d_out = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, d_out)
    into = [torch.ones_like(weight) for weight in weights]
    found = grouped_experts(x, scores, ids, *weights, activation=activation, into=into)
    torch.testing.assert_close(found, expected)
    dx, d_scores = torch.autograd.grad(found, (x, scores), d_out)
    torch.testing.assert_close((dx, d_scores), gradients[:2])
    for sums, gradient in zip(into, gradients[2:], strict=True):
        torch.testing.assert_close(sums, 1 + gradient)


@apart
def test_scores_get_gradients_of_their_own_type() -> None:
    ids = torch.tensor([[0, 1], [1, -1]])
    x, up, down = (
        torch.randn(2, 4).bfloat16(),
        torch.randn(2, 6, 4).bfloat16(),
        torch.randn(2, 4, 3).bfloat16(),
    )
    scores = torch.rand(2, 2, dtype=torch.bfloat16, requires_grad=True)
    grouped_experts(x, scores, ids, up, down).sum().backward()
    assert scores.grad is not None
    assert scores.grad.dtype == torch.bfloat16
    assert scores.grad[1, 1] == 0, "nothing was chosen there"
