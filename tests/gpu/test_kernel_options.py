"""Activations and biases on a CUDA device, sizes that fall back, compiled graphs and captured ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from moeclipse.ops.activation import ACTIVATIONS, hidden_width
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference
from moeclipse.ops.topk_softmax import topk_softmax

# Counted through NVML: asking CUDA itself here would spoil forked ranks.
HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
NAMES = ("out", "dx", "dscores", "dup", "ddown", "dup_bias", "ddown_bias")


def arguments(
    activation: str, dtype: torch.dtype, *, bias: bool = True, d: int = 264, f: int = 136
) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    num_tokens, num_experts, top_k = 517, 12, 3
    h = hidden_width(activation, f)
    x = torch.randn(num_tokens, d, device="cuda")
    scores = torch.rand(num_tokens, top_k, device="cuda")
    up = torch.randn(num_experts, h, d, device="cuda") * d**-0.5
    down = torch.randn(num_experts, d, f, device="cuda") * f**-0.5
    biases = [torch.randn(num_experts, n, device="cuda") for n in (h, d)] if bias else []
    ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k, 1).indices
    ids[::5, 1] = -1
    return [x.to(dtype), scores, up.to(dtype), down.to(dtype), *(b.to(dtype) for b in biases)], ids


def gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], ids: torch.Tensor, activation: str
) -> list[torch.Tensor]:
    tensors = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*tensors[:2], ids, *tensors[2:], activation=activation)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, device="cuda").to(out.dtype))
    return [out.detach(), *(tensor.grad for tensor in tensors)]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_are_those_of_plain_torch(activation: str, dtype: torch.dtype) -> None:
    inputs, ids = arguments(activation, dtype)
    torch.manual_seed(1)
    exact = gradients(grouped_experts_reference, [t.double() for t in inputs], ids, activation)
    plain = gradients(grouped_experts_reference, inputs, ids, activation)
    ours = gradients(grouped_experts, inputs, ids, activation)
    again = gradients(grouped_experts, inputs, ids, activation)
    for name, got, same, beside, truth in zip(NAMES, ours, again, plain, exact, strict=True):
        assert error(got, truth) <= 1.1 * error(beside, truth) + 1e-7, name
        assert torch.equal(got, same), name


def test_odd_widths_run_in_plain_torch_and_say_so() -> None:
    inputs, ids = arguments("swiglu", torch.bfloat16, bias=False, d=260, f=130)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = gradients(grouped_experts, inputs, ids, "swiglu")
    assert any("multiples of 8" in str(warning.message) for warning in told)
    exact = gradients(grouped_experts_reference, [t.double() for t in inputs], ids, "swiglu")
    assert all(error(got, truth) < 0.02 for got, truth in zip(ours, exact, strict=True))


def layer(x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    scores, ids = topk_softmax(x @ router.t(), 3)
    return x + grouped_experts(x, scores, ids, up, down)


def layer_inputs() -> list[torch.Tensor]:
    (x, _, up, down), _ = arguments("swiglu", torch.bfloat16, bias=False)
    router = torch.randn(12, x.shape[1], device="cuda").bfloat16()
    return [tensor.requires_grad_() for tensor in (x, router, up, down)]


def test_one_compiled_graph_equals_eager() -> None:
    tensors = layer_inputs()
    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(2):
        expected, found = layer(*tensors), compiled(*tensors)
        d_out = torch.randn_like(expected)
        truths = torch.autograd.grad(expected, tensors, d_out)
        grads = torch.autograd.grad(found, tensors, d_out)
        assert error(found, expected) < 1e-2
        assert all(error(got, truth) < 1e-2 for got, truth in zip(grads, truths, strict=True))


def test_a_captured_graph_replays_with_new_tokens() -> None:
    """Routing changes between replays: nothing about it is known to the host."""
    tensors = layer_inputs()
    x = tensors[0]
    d_out = torch.randn_like(x)

    def step() -> list[torch.Tensor]:
        out = layer(*tensors)
        return [out, *torch.autograd.grad(out, tensors, d_out)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        for got, truth in zip(captured, step(), strict=True):
            assert torch.equal(got, truth)
