"""The roofline: what it says of products that were measured, and in its limits."""

from __future__ import annotations

import pytest

from moeclipse.cost.hardware import device
from moeclipse.cost.kernels import Kernels, keys_seen

H200, H100 = Kernels(device=device("h200")), Kernels(device=device("h100"))


def tflops(kernels: Kernels, m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k / kernels.product(m, n, k) / 1e12


def test_large_products_reach_what_was_measured() -> None:
    assert tflops(H200, 8192, 8192, 8192) == pytest.approx(773, rel=0.05)
    for k, measured in ((512, 588), (2048, 616), (4096, 646), (16384, 665)):
        assert tflops(H100, 8192, 8192, k) == pytest.approx(measured, rel=0.06)


def test_few_rows_are_bound_by_weights() -> None:
    small = H200.product(16, 8192, 8192)
    assert small == pytest.approx(2 * (16 * 8192 * 2 + 8192 * 8192) / (4.8e12 * 0.9) + 4e-6, rel=0.02)
    # one tile, whose inner dimension eight processors share
    assert H200.product(128, 256, 8192) == pytest.approx(
        2 * 128 * 256 * 8192 * 132 / 8 * (1024 + 64) / 1024 / (989e12 * 0.78) + 4e-6
    )
    assert H200.product(0, 8, 8) == 0.0


def test_grouped_products_were_measured_too() -> None:
    """Forward and both gradients of torch's grouped product, equal groups (H200)."""
    shapes = [(7168, 2048, 32, 65536, 616), (4096, 14336, 8, 16384, 580), (2048, 1024, 64, 262144, 501)]
    for d, n, groups, rows, measured in [
        *shapes,
        (2048, 768, 128, 262144, 484),
        (1536, 256, 128, 196608, 379),
    ]:
        seconds = H200.grouped(rows, groups, 2 * n, d) + H200.grouped(rows, groups, d, n)
        seconds += H200.grouped(rows, groups, d, 2 * n) + H200.grouped(rows, groups, n, d)
        seconds += H200.grouped_weights(rows, groups, 2 * n, d) + H200.grouped_weights(rows, groups, d, n)
        assert 18.0 * rows * d * n / seconds / 1e12 == pytest.approx(measured, rel=0.12)


def test_groups_fill_tiles_of_their_own() -> None:
    even = H200.grouped(128 * 64, 64, 4096, 4096)
    assert H200.grouped(65 * 64, 64, 4096, 4096) == pytest.approx(even, rel=0.05)
    assert H200.grouped(0, 64, 4096, 4096) == H200.grouped_weights(0, 64, 4096, 4096) == 0.0


def test_weights_of_many_experts_are_bound_by_fp32_sums() -> None:
    seconds = H200.grouped_weights(128, 128, 4096, 4096)
    assert seconds == pytest.approx(8 * 128 * 4096**2 / (4.8e12 * 0.9), rel=0.01)


def test_fp8_counts_where_a_device_has_it() -> None:
    assert H100.product(8192, 8192, 8192, "fp8") < 0.85 * H100.product(8192, 8192, 8192)
    a100 = Kernels(device=device("a100"))
    assert a100.product(8192, 8192, 8192, "fp8") == a100.product(8192, 8192, 8192)


def test_experts_of_deepseek_as_in_their_trace() -> None:
    """Three products of 4,096 tokens with 8 + 1 experts, on 112 of 132 processors: 4.60 ms."""
    rows = 4096 * 8
    seconds = H100.grouped(rows, 4, 4096, 7168, "fp8") + H100.grouped(rows, 4, 7168, 2048, "fp8")
    seconds += H100.product(4096, 4096, 7168, "fp8") + H100.product(4096, 7168, 2048, "fp8")
    assert seconds * 132 / 112 == pytest.approx(4.60e-3, rel=0.05)


def test_keys_of_a_mask_and_of_a_window() -> None:
    listed = [sum(1 for key in range(token + 1) if token - key < 3) for token in range(7)]
    assert keys_seen(7, 3) == pytest.approx(sum(listed) / 7)
    assert keys_seen(7) == 4
    assert keys_seen(7, 100) == 4


def test_latent_attention_has_two_widths() -> None:
    forward = H100.attention(4096, 2048.5, 128, 192, 128, backward=False) - 4e-6
    assert forward == pytest.approx(2 * 4096 * 2048.5 * 128 * 320 / (989e12 * 0.55))
    backward = H100.attention(4096, 2048.5, 128, 192, 128, backward=True) - 4e-6
    assert backward == pytest.approx(2 * 4096 * 2048.5 * 128 * (3 * 192 + 2 * 128) / (989e12 * 0.45))
    assert H100.attention(0, 1, 1, 1, 1, backward=False) == 0.0
