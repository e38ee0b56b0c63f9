"""Forward, dgrad and wgrad apart, and backward whole: the same gradients, in every order."""

from __future__ import annotations

import pytest
import torch

from apart import apart
from moeclipse.ops import expert_passes
from moeclipse.ops.activation import ACTIVATIONS, Activation, hidden_width
from moeclipse.ops.expert_passes import ADAPTERS, WEIGHTS, ExpertState, ExpertWeights, in_row_order
from moeclipse.ops.grouped_experts import grouped_experts_reference
from moeclipse.ops.grouping import group_rows

T, D, F, E, K = 7, 6, 4, 5, 3


def given(
    activation: Activation, bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights]:
    torch.manual_seed(0)
    ids = torch.rand(T, E).topk(K, 1).indices
    ids[::3, 1] = -1
    h = hidden_width(activation, F)
    shapes = [(E, h, D), (E, D, F), *([(E, h), (E, D)] if bias else [])]
    weights = ExpertWeights.of([torch.randn(shape, dtype=torch.float64) for shape in shapes])
    options = {"dtype": torch.float64}
    return torch.randn(T, D, **options), torch.rand(T, K, **options), ids, weights


def run_forward(activation: Activation, bias: bool) -> tuple[torch.Tensor, ExpertState, ExpertWeights]:
    x, scores, ids, weights = given(activation, bias)
    grouping = group_rows(ids, E)
    out, state = expert_passes.forward(x, in_row_order(scores, grouping), weights, grouping, activation)
    return out, state, weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@apart
def test_pieces_give_the_gradients_of_autograd(activation: Activation, bias: bool) -> None:
    x, scores, ids, weights = given(activation, bias)
    leaves = [t.clone().requires_grad_() for t in (x, scores, *weights.tensors()) if t is not None]
    expected = grouped_experts_reference(*leaves[:2], ids, *leaves[2:], activation=activation)
    d_out = torch.randn_like(x)
    d_x, d_scores, *d_weights = torch.autograd.grad(expected, leaves, d_out)
    out, state, weights = run_forward(activation, bias)
    torch.testing.assert_close(out, expected.detach())
    dx, d_score_M, hidden = expert_passes.dgrad(d_out, state, weights)
    torch.testing.assert_close(dx, d_x)
    place = state.grouping.place_row_TK
    assert place is not None
    torch.testing.assert_close(d_score_M[place[place >= 0].long()], d_scores[place >= 0])
    for found, truth in zip(added(hidden, weights), d_weights, strict=True):
        torch.testing.assert_close(found, 1 + truth)


def added(hidden: expert_passes.HiddenGrads, weights: ExpertWeights) -> list[torch.Tensor]:
    sums = [torch.ones_like(t) for t in weights.tensors() if t is not None]
    hidden.add_to(*sums)
    return sums


@pytest.mark.parametrize("accumulate", [False, True])
def test_backward_is_dgrad_and_wgrad(accumulate: bool) -> None:
    _, state, weights = run_forward("swiglu", True)
    d_out = torch.randn(T, D, dtype=torch.float64)
    dx, d_score_M, hidden = expert_passes.dgrad(d_out, state, weights)
    sums = added(hidden, weights)
    grads = ExpertWeights.of([None if t is None else torch.ones_like(t) for t in weights.tensors()])
    whole_dx, whole_d_scores = expert_passes.backward(d_out, state, weights, grads, accumulate=accumulate)
    assert torch.equal(whole_dx, dx)
    place = state.grouping.place_row_TK
    assert place is not None
    assert whole_d_scores[place < 0].eq(0).all(), "a place that is not used has no gradient"
    assert torch.equal(whole_d_scores[place >= 0], d_score_M[place[place >= 0].long()])
    for found, truth in zip(grads.tensors(), sums, strict=False):
        assert found is not None
        torch.testing.assert_close(found, truth if accumulate else truth - 1)


def test_rows_that_lie_otherwise_are_no_matter() -> None:
    out, state, weights = run_forward("gelu", False)
    turned = state.x_TD.t().contiguous().t()
    assert not turned.is_contiguous()
    again, kept = expert_passes.forward(turned, state.scores_M, weights, state.grouping, "gelu")
    assert torch.equal(again, out)
    assert kept.x_TD is turned, "no copy of the input is kept"
    d_out = torch.randn(D, T, dtype=torch.float64).t()
    plain = expert_passes.dgrad(d_out.contiguous(), state, weights)
    odd = expert_passes.dgrad(d_out, kept, weights)
    assert torch.equal(plain[0], odd[0])
    for one, other in zip(added(plain[2], weights), added(odd[2], weights), strict=True):
        assert torch.equal(one, other)


def test_weights_without_biases() -> None:
    up, down = torch.ones(2, 4, 3), torch.ones(2, 3, 2)
    weights = ExpertWeights.of((up, down))
    assert weights.tensors() == (up, down, *(None,) * 6)
    assert weights.names == WEIGHTS
    shapes = [None if t is None else t.shape for t in weights.empty_grads().tensors()]
    assert shapes == [up.shape, down.shape, *(None,) * 6]
    asked = weights.empty_grads((True, *(False,) * 7))
    assert [t is None for t in asked.tensors()] == [False, *(True,) * 7]


def test_weights_by_name() -> None:
    tensors = [torch.ones(1) * number for number in range(4)]
    names = (*WEIGHTS, *ADAPTERS[2:])
    weights = ExpertWeights.of(tensors, names, 1.5)
    assert weights.names == names
    assert weights.tensors() == (*tensors[:2], *(None,) * 4, *tensors[2:])
    assert (weights.up_adapter, weights.scale) == (None, 1.5)
    with pytest.raises(ValueError, match="zip"):
        ExpertWeights.of(tensors[:3], names)
