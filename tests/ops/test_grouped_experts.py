"""All experts of a layer in plain torch, against autograd through one expert after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apart import apart
from moeclipse.ops import expert_mlp, expert_passes, low_rank
from moeclipse.ops.activation import ACTIVATIONS, hidden_width
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference
from moeclipse.ops.grouped_gemm import grouped_wgrad


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


def with_adapters(
    activation: str, which: str, rank: int = 2
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    """(ids, [x, scores, four weights], adapters), all of which want gradients."""
    torch.manual_seed(0)
    ids, h = torch.rand(7, 3).topk(2, 1).indices, hidden_width(activation, 4)
    ids[2, 1] = -1
    shapes = [(7, 6), (7, 2), (3, h, 6), (3, 6, 4), (3, h), (3, 6)]
    adapters = [(3, rank, 6), (3, h, rank), (3, rank, 4), (3, 6, rank)]
    made = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in (*shapes, *adapters)]
    has = {"up": (True, True, False, False), "down": (False, False, True, True), "both": (True,) * 4}[which]
    return ids, made[:6], [t if wanted else None for t, wanted in zip(made[6:], has, strict=True)]


@pytest.mark.parametrize("which", ["up", "down", "both"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@apart
def test_adapters_are_weights_of_low_rank(activation: str, which: str) -> None:
    ids, tensors, adapters = with_adapters(activation, which)
    options = {"activation": activation, "adapters": adapters, "scale": 1.5}
    leaves = [*tensors, *(t for t in adapters if t is not None)]
    expected = grouped_experts_reference(*tensors[:2], ids, *tensors[2:], **options)
    d_out = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, leaves, d_out)
    into = [None if t is None else torch.ones_like(t) for t in (*tensors[2:], *adapters)]
    for _ in range(2):
        found = grouped_experts(*tensors[:2], ids, *tensors[2:], **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for got, right in zip(torch.autograd.grad(found, leaves, d_out), truth, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
        grouped_experts(*tensors[:2], ids, *tensors[2:], **options, into=into).backward(d_out)
    for sums, right in zip([t for t in into if t is not None], truth[2:], strict=True):
        torch.testing.assert_close(sums, 1 + 2 * right, rtol=1e-12, atol=1e-12)


@apart
def test_what_is_frozen_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, tensors, adapters = with_adapters("swiglu", "both")
    for frozen in (tensors[0], *tensors[2:]):
        frozen.requires_grad_(False)
    shapes = []

    def watched(
        dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, into: torch.Tensor, **how: Any
    ) -> None:
        shapes.append(tuple(into.shape))
        grouped_wgrad(dy, x, offsets, into, **how)

    monkeypatch.setattr(low_rank, "grouped_wgrad", watched)
    monkeypatch.setattr(expert_passes, "grouped_wgrad", watched)
    monkeypatch.setattr(expert_mlp, "d_rows", None)  # nobody wants the gradient of x
    grouped_experts(*tensors[:2], ids, *tensors[2:], adapters=adapters, scale=0.5).sum().backward()
    assert sorted(shapes) == sorted(tuple(t.shape) for t in adapters if t is not None)
    assert all(t.grad is not None for t in adapters if t is not None)


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
