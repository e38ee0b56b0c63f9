"""What lies between the products, on a CUDA device: errors against float64 beside plain torch, equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from moeclipse.ops.activation import ACTIVATIONS, activate, activated, hidden_width
from moeclipse.ops.cross_entropy import gradient, gradient_reference, statistics, statistics_reference
from moeclipse.ops.embedding import embedding_grad_product, embedding_grad_reference
from moeclipse.ops.norm import add_norm, add_norm_reference, beside_norm, rms_norm, rms_norm_reference
from moeclipse.ops.rotary import turn, turn_reference
from moeclipse.tensor.weight_grad import attach, place_of

HAS_GPU = torch.cuda.device_count() > 0  # through NVML: asking CUDA itself would spoil forked ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

Call = Callable[..., Any]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def results(call: Call, operands: Sequence[torch.Tensor], narrow: torch.dtype) -> list[torch.Tensor]:
    """Outputs and gradients of all operands, for fixed gradients of the outputs, which `narrow` can hold."""
    given = [tensor.detach().clone().requires_grad_() for tensor in operands]
    outs = call(*given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator("cuda").manual_seed(1)
    d_outs = [torch.randn(out.shape, device="cuda", generator=generator).to(narrow) for out in outs]
    torch.autograd.backward(outs, [d.to(out.dtype) for d, out in zip(d_outs, outs, strict=True)])
    return [*(out.detach() for out in outs), *(tensor.grad for tensor in given)]


def compare(ours: Call, reference: Call, operands: Sequence[torch.Tensor]) -> None:
    narrow = operands[0].dtype
    truth = results(reference, [tensor.double() for tensor in operands], narrow)
    beside, got, again = (results(call, operands, narrow) for call in (reference, ours, ours))
    for number, (mine, plain, right) in enumerate(zip(got, beside, truth, strict=True)):
        size = right.norm().clamp(min=1e-30)
        errors = [((tensor.double() - right).norm() / size).item() for tensor in (mine, plain)]
        assert errors[0] <= 1.1 * errors[1] + 1e-7, f"result {number}: {errors}"
        assert torch.equal(mine, again[number]), f"result {number}: two runs, other bits"


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (1000, 2048), (77, 200), (3, 50, 16, 128), (9, 7168)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, b, weight = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype)
    compare(lambda *t: rms_norm(*t, 1e-5), lambda *t: rms_norm_reference(*t, 1e-5), [x, weight])
    compare(lambda *t: add_norm(*t, 1e-5), lambda *t: add_norm_reference(*t, 1e-5), [x, b, weight])
    plain = lambda x, w: (1 * x, rms_norm_reference(x, w, 1e-5))  # noqa: E731
    compare(lambda *t: beside_norm(*t, 1e-5), plain, [x, weight])


def test_gradients_of_norms_reach_their_place() -> None:
    torch.manual_seed(0)
    x, weight = normal(1000, 2048, dtype=torch.bfloat16), nn.Parameter(normal(2048, dtype=torch.bfloat16))
    wide = weight.detach().double().requires_grad_()
    rms_norm_reference(x.double(), wide, 1e-5).sum().backward()
    assert wide.grad is not None
    for dtype in (torch.float32, torch.bfloat16):
        state = attach(weight, torch.full_like(weight, 7, dtype=dtype), lambda: None)
        state.empty = True
        for times in (1, 2):
            rms_norm(x, weight, 1e-5, place_of(weight)).sum().backward()
            assert weight.grad is None
            error = (state.main_grad.double() - times * wide.grad).norm() / (times * wide.grad).norm()
            assert error < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 64), (2, 300, 16, 4, 128), (3, 50, 6, 6, 24)])
def test_rotary_positions(shape: tuple[int, ...], normed: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    samples, length, num_heads, num_keys, d = shape
    operands = [normal(samples, length, heads, d, dtype=dtype) for heads in (num_heads, num_keys)]
    operands += [normal(d, dtype=dtype) for _ in range(2)] if normed else []
    angle = torch.rand(length, d // 2, device="cuda", dtype=torch.float64) * 6
    table = torch.stack([angle.cos(), angle.sin()])
    for neighbours in (False, True):

        def ours(q, k, *weights, neighbours=neighbours):
            return turn(q, k, table, neighbours, weights or None, 1e-5)

        def reference(q, k, *weights, neighbours=neighbours):
            given = zip((q, k), weights or (None, None), strict=True)
            return tuple(turn_reference(x, table, neighbours, weight, 1e-5) for x, weight in given)

        compare(ours, reference, operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (300, 256), (64, 50_304)])
def test_numbers_and_gradients_of_logits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (10 * torch.randn(shape, device="cuda")).to(dtype)
    target, d_loss = torch.randint(-1, shape[1], shape[:1], device="cuda"), torch.tensor(0.3, device="cuda")
    exact = statistics_reference(logits.double(), target)
    log_sum = exact[0] + exact[1].log()
    got = statistics(logits, target)
    assert torch.allclose(got.double(), exact, rtol=1e-6)
    truth = gradient_reference(logits.double(), log_sum, target, d_loss)
    plain = gradient_reference(logits, log_sum.float(), target, d_loss)
    ours = gradient(logits, log_sum.float(), target, d_loss)
    errors = [(tensor.double() - truth).norm().item() for tensor in (ours, plain)]
    assert errors[0] <= 1.1 * errors[1] + 1e-7 * truth.norm().item()
    assert gradient(logits, log_sum.float(), target, d_loss, in_place=True) is logits
    assert torch.equal(logits, ours)


def test_gradients_of_a_lookup() -> None:
    torch.manual_seed(0)
    ids, d_h = torch.randint(0, 256, (5000,), device="cuda"), normal(5000, 64, dtype=torch.bfloat16)
    sums = [torch.zeros(256, 64, device="cuda") for _ in range(3)]
    embedding_grad_product(ids, d_h, sums[0])
    embedding_grad_product(ids, d_h, sums[1])
    embedding_grad_reference(ids, d_h, sums[2])
    assert torch.equal(sums[0], sums[1])
    assert torch.allclose(sums[0], sums[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, width in ((1, 8), (1000, 1500)):
        h = 4 * normal(rows, hidden_width(name, width), dtype=dtype)  # beyond limits, too
        compare(lambda h: activated(h, name), lambda h: activate(h, name), [h])
