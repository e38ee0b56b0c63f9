"""The registered operators: torch's own checks, and compiled calls against eager ones."""

from __future__ import annotations

import pytest
import torch

from apart import apart
from moeclipse.ops import expert_operators
from moeclipse.ops.activation import ACTIVATIONS, hidden_width
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference


def arguments(activation: str, *, bias: bool, num_tokens: int = 7) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    d, f, num_experts, top_k = 6, 4, 5, 3
    h = hidden_width(activation, f)
    shapes = [(num_tokens, d), (num_tokens, top_k), (num_experts, h, d), (num_experts, d, f)]
    shapes += [(num_experts, h), (num_experts, d)] if bias else []
    ids = torch.rand(num_tokens, num_experts).topk(top_k, 1).indices
    ids[::3, 1] = -1
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes], ids


@pytest.mark.parametrize("bias", [False, True])
@apart
def test_torch_accepts_the_operators(bias: bool) -> None:
    tensors, ids = arguments("geglu", bias=bias)
    x, scores, *weights = tensors
    weights += [] if bias else [None, None]
    shapes = [(5, 2, 6), (5, 8, 2), (5, 2, 4), (5, 6, 2)]
    made = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    adapters = made if bias else [None] * 4
    given = (x, scores, ids, *weights, *adapters, "geglu", 1.5)
    torch.library.opcheck(expert_operators.grouped_experts, given)


@apart
def test_a_second_derivative_is_refused() -> None:
    (x, scores, *weights), ids = arguments("geglu", bias=False)
    given = (x, scores, ids, *weights, *[None] * 6, "geglu", 1.0)
    out = expert_operators.grouped_experts(*given)[0]
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="grouped_experts was differentiated with create_graph=True"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@apart
def test_one_graph_gives_the_eager_gradients(activation: str, bias: bool) -> None:
    tensors, ids = arguments(activation, bias=bias)

    def layer(x: torch.Tensor, scores: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return grouped_experts(x * 2, scores, ids, *weights, activation=activation).tanh()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*tensors), layer(*tensors)
    torch.testing.assert_close(found, expected)
    d_out = torch.randn_like(expected)
    for got, truth in zip(
        torch.autograd.grad(found, tensors, d_out), torch.autograd.grad(expected, tensors, d_out), strict=True
    ):
        torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("frozen", [False, True])
@apart
def test_adapters_inside_a_graph(frozen: bool) -> None:
    tensors, ids = arguments("swiglu", bias=False)
    shapes = [(5, 2, 6), (5, 8, 2), (5, 2, 4), (5, 6, 2)]
    adapters = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    if frozen:
        for weight in tensors[2:]:
            weight.requires_grad_(False)

    def layer(*given: torch.Tensor) -> torch.Tensor:
        x, scores, *weights = given
        return grouped_experts(x * 2, scores, ids, *weights[:2], adapters=weights[2:], scale=1.5).tanh()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    given = (*tensors, *adapters)
    found, expected = compiled(*given), layer(*given)
    torch.testing.assert_close(found, expected)
    d_out, wanted = torch.randn_like(expected), [t for t in given if t.requires_grad]
    pairs = (torch.autograd.grad(out, wanted, d_out) for out in (found, expected))
    for got, truth in zip(*pairs, strict=True):
        torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@apart
def test_gradients_are_those_of_finite_differences(activation: str, bias: bool) -> None:
    tensors, ids = arguments(activation, bias=bias, num_tokens=4)
    torch.autograd.gradcheck(
        lambda x, scores, *weights: grouped_experts(x, scores, ids, *weights, activation=activation), tensors
    )
    expected = grouped_experts_reference(*tensors[:2], ids, *tensors[2:], activation=activation)
    found = grouped_experts(*tensors[:2], ids, *tensors[2:], activation=activation)
    torch.testing.assert_close(found, expected)


def test_sums_cannot_be_added_to_inside_a_graph() -> None:
    tensors, ids = arguments("swiglu", bias=False)
    into = (torch.zeros_like(tensors[2]), torch.zeros_like(tensors[3]))
    compiled = torch.compile(
        lambda *t: grouped_experts(*t[:2], ids, *t[2:], into=into), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="cannot add gradients to `into` inside"):
        compiled(*tensors)
