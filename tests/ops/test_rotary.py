"""Turning pairs of components: complex numbers times e^(i angle), with samples that share a table or not."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.norm import rms_norm
from moeclipse.ops.rotary import rotate, turn
from moeclipse.testing.compare import difference

B, S, H, G, D = 2, 3, 4, 1, 6


def table(rows: int) -> torch.Tensor:
    angle = torch.linspace(0, 3, rows * D // 2, dtype=torch.float64).view(rows, D // 2)
    return torch.stack([angle.cos(), angle.sin()])


def queries_and_keys(samples: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(samples, S, H, D, dtype=torch.float64, generator=generator)
    return q, torch.randn(samples, S, G, D, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("rows", [S, B * S])
def test_pairs_turn_like_complex_numbers(neighbours: bool, rows: int) -> None:
    given = queries_and_keys()
    angles = torch.complex(*table(rows)).view(-1, S, 1, D // 2)
    for x, turned in zip(given, turn(*given, table(rows), neighbours), strict=True):
        halves = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
        expected = torch.complex(*(half.contiguous() for half in halves)) * angles
        both = torch.stack([expected.real, expected.imag], dim=-1).flatten(-2)
        if not neighbours:
            both = torch.cat([expected.real, expected.imag], dim=-1)
        assert difference(turned, both) < 1e-15


def test_norms_come_first() -> None:
    q, k = queries_and_keys()
    weights = torch.linspace(-1, 2, D, dtype=torch.float64), torch.linspace(1, 3, D, dtype=torch.float64)
    found = turn(q, k, table(S), norms=weights, eps=1e-5)
    normed = [rms_norm(x, weight, 1e-5) for x, weight in zip((q, k), weights, strict=True)]
    for got, expected in zip(found, turn(*normed, table(S)), strict=True):
        assert torch.equal(got, expected)


def test_no_samples_and_components_that_stay() -> None:
    found = turn(*queries_and_keys(0), table(S))
    assert [tuple(x.shape) for x in found] == [(0, S, H, D), (0, S, G, D)]
    x = torch.randn(S, D + 2, dtype=torch.float64)
    turned = rotate(x, table(S))
    assert torch.equal(turned[:, D:], x[:, D:])
    assert torch.equal(turned[:, :D], rotate(x[:, :D], table(S)))
