"""Products of groups of rows, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.ops import grouped_gemm
from moeclipse.ops.grouped_gemm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad
from moeclipse.testing.compare import difference


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


def test_the_library_is_told_where_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def library(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        seen.append(offs.tolist())
        assert offs.dtype == torch.int32
        return x.new_zeros(len(x), weight.shape[2])

    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(F, "grouped_mm", library, raising=False)
    assert grouped_mm(torch.ones(5, 8), torch.ones(3, 16, 8), [2, 0, 3]).shape == (5, 16)
    assert seen == [[2, 2, 5]]


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True),
        ({"is_cuda": False}, False),
        ({"dtype": torch.float16}, False),
        ({"shape": (0, 16)}, False),
        ({"shape": (5, 12)}, False),
    ],
)
def test_what_the_library_takes(change: dict[str, Any], takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 on CUDA, some rows, widths that are multiples of 8."""

    class Rows:
        is_cuda, dtype, shape = True, torch.bfloat16, (5, 16)

    rows, weight = Rows(), torch.empty(3, 16, 24)
    monkeypatch.setattr(F, "grouped_mm", None, raising=False)
    for name, value in change.items():
        monkeypatch.setattr(Rows, name, value)
    assert grouped_gemm._has_kernel(rows, weight) is takes  # type: ignore[arg-type]
    assert not grouped_gemm._has_kernel(rows, weight[..., :20])  # type: ignore[arg-type]
