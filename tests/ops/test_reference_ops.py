"""The plain-torch references: random numbers, SwiGLU, grouped products and row sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.ops.activation import swiglu, swiglu_backward
from moeclipse.ops.combine import sum_rows
from moeclipse.ops.grouped_gemm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad
from moeclipse.ops.random import fill_normal, key_of, normal, uniform
from moeclipse.testing.compare import difference


def mix(x: int) -> int:
    """splitmix64's finaliser in plain integers."""
    mask = (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_uniform_equals_plain_integers(key: int, index: list[int]) -> None:
    expected = [((mix((i * 0x9E3779B97F4A7C15 + key) % 2**64) >> 11) + 0.5) * 2.0**-53 for i in index]
    assert uniform(key, torch.tensor(index)).tolist() == expected


def test_normal_numbers_are_normal() -> None:
    x = normal(key_of("test"), torch.arange(200_000))
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs((x < 1).double().mean() - 0.8413) < 0.005
    assert abs((x[:-1] * x[1:]).mean()) < 0.01, "neighbours are independent"


def test_filling_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill_normal(torch.empty(30, 10), 7, 2.0)
    monkeypatch.setattr("moeclipse.ops.random.CHUNK", 37)
    assert torch.equal(fill_normal(torch.empty(30, 10), 7, 2.0), whole)
    assert key_of(1, "1") != key_of("1", 1)


def test_swiglu_backward_is_autograd() -> None:
    h = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    d_a = torch.randn(5, 4, dtype=torch.float64)
    gate, up = h.chunk(2, dim=-1)
    assert torch.equal(swiglu(h), F.silu(gate) * up)
    (expected,) = torch.autograd.grad((swiglu(h) * d_a).sum(), h)
    d_h, a = swiglu_backward(d_a, h.detach())
    assert difference(d_h, expected) < 1e-15
    assert difference(a, swiglu(h)) < 1e-15


@settings(max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_grouped_products_by_hand(counts: list[int]) -> None:
    x = torch.randn(sum(counts), 6, dtype=torch.float64)
    dy = torch.randn(sum(counts), 3, dtype=torch.float64)
    weight = torch.randn(len(counts), 3, 6, dtype=torch.float64)
    groups = [(a, a + n) for a, n in zip([sum(counts[:i]) for i in range(len(counts))], counts, strict=True)]
    y = torch.cat([x[a:b] @ w.T for (a, b), w in zip(groups, weight, strict=True)])
    dx = torch.cat([dy[a:b] @ w for (a, b), w in zip(groups, weight, strict=True)])
    assert torch.allclose(grouped_mm(x, weight, counts), y)
    assert torch.allclose(grouped_mm_dgrad(dy, weight, counts), dx)
    before = torch.randn_like(weight)
    into = before.clone()
    grouped_mm_wgrad(dy, x, counts, into=into)
    expected = before + torch.stack([dy[a:b].T @ x[a:b] for a, b in groups])
    assert torch.allclose(into, expected)
    assert all(torch.equal(into[e], before[e]) for e, n in enumerate(counts) if n == 0)


def test_weight_gradients_add_up_in_fp32() -> None:
    dy, x = torch.randn(64, 4).bfloat16(), torch.randn(64, 6).bfloat16()
    into = torch.zeros(1, 4, 6)
    for _ in range(3):
        grouped_mm_wgrad(dy, x, [64], into=into)
    assert difference(into[0], 3 * dy.double().T @ x.double()) < 1e-2
    assert into.dtype == torch.float32


def test_rows_that_nothing_points_at_are_zero() -> None:
    rows = torch.randn(3, 2, dtype=torch.float64)
    out = sum_rows(rows, torch.tensor([2, 0, 2]), 4, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    assert torch.allclose(out[2], 0.5 * rows[0] + 2 * rows[2])
    assert torch.count_nonzero(out[[1, 3]]) == 0
    assert sum_rows(rows.bfloat16(), torch.tensor([0, 0, 0]), 1).dtype == torch.bfloat16
