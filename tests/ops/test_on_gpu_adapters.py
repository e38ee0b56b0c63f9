"""Experts with adapters on a CUDA device: errors beside those of plain torch, equal bits, no host copy."""

from __future__ import annotations

import pytest
import torch
from test_on_gpu import CASES, Case, error, make

from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
NAMES = ("out", "dx", "dscores", "up_a", "up_b", "down_a", "down_b")


def adapters_of(case: Case, rank: int) -> list[torch.Tensor]:
    d, n, e = case.d, case.n, case.num_experts
    shapes = ((e, rank, d), (e, 2 * n, rank), (e, rank, n), (e, d, rank))
    return [(torch.randn(s, device="cuda") * s[2] ** -0.5).to(case.dtype) for s in shapes]


def gradients(function, inputs, ids, d_out, adapters, **options) -> list[torch.Tensor | None]:
    """Of everything but the base, which is frozen."""
    x, scores = (tensor.detach().clone().requires_grad_() for tensor in inputs[:2])
    given = [None if a is None else a.detach().clone().requires_grad_() for a in adapters]
    out = function(x, scores, ids, *inputs[2:], adapters=given, scale=0.5, **options)
    out.backward(d_out.to(out.dtype))
    return [out.detach(), x.grad, scores.grad, *(None if a is None else a.grad for a in given)]


def check(case: Case, rank: int, which: tuple[bool, ...] = (True,) * 4) -> None:
    inputs, ids, d_out = make(case)
    adapters = [a if has else None for a, has in zip(adapters_of(case, rank), which, strict=True)]
    wide = [None if a is None else a.double() for a in adapters]
    exact = gradients(grouped_experts_reference, [t.double() for t in inputs], ids, d_out, wide)
    plain = gradients(grouped_experts_reference, inputs, ids, d_out, adapters)
    ours = gradients(grouped_experts, inputs, ids, d_out, adapters)
    for name, got, beside, truth in zip(NAMES, ours, plain, exact, strict=True):
        if truth is not None:
            # Autograd of a merged weight rounds W + BA once and its gradient once more; we round u and d_u.
            assert got is not None
            assert beside is not None
            assert error(got, truth) <= 1.25 * error(beside, truth) + 1e-3, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_are_those_of_merged_weights(case: Case) -> None:
    check(case, 16)


@pytest.mark.parametrize("rank", [4, 8, 24, 64, 72, 128, 256])
def test_every_rank(rank: int) -> None:
    check(Case("skewed"), rank)


@pytest.mark.parametrize(
    "which", [(True, True, False, False), (False, False, True, True)], ids=["up", "down"]
)
def test_one_projection_alone(which: tuple[bool, ...]) -> None:
    check(Case("empty"), 16, which)


@pytest.mark.parametrize("rank", [4, 16])
def test_gradients_add_into_fp32_with_the_same_bits_and_without_a_word_to_the_host(rank: int) -> None:
    case = Case("empty")
    inputs, ids, d_out = make(case)
    adapters = adapters_of(case, rank)
    exact = gradients(
        grouped_experts_reference, [t.double() for t in inputs], ids, d_out, [a.double() for a in adapters]
    )
    found = []
    for _ in range(2):
        into = [torch.full_like(a, 2.0, dtype=torch.float32) for a in adapters]
        sums = [None] * 4 + into
        gradients(grouped_experts, inputs, ids, d_out, adapters, into=sums)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                ours = gradients(grouped_experts, inputs, ids, d_out, adapters, into=sums)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(grad is None for grad in ours[3:])
        found.append(into)
    for first, second, truth in zip(*found, exact[3:], strict=True):
        assert torch.equal(first, second)
        assert error(first - 2, 3 * truth) < 2e-2
        assert torch.equal(first[1], torch.full_like(first[1], 2.0)), "an expert without rows"
