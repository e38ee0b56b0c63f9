"""Weight gradients: dense and grouped, added or written, and what the kernels are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import assert_equal_references

from moeclipse.ops import grouped_gemm
from moeclipse.ops.grouped_gemm import dense_wgrad, grouped_wgrad, wgrad_fits
from moeclipse.ops.tuning import Tile


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dense_wgrad_adds(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dy, x = torch.randn(9, 4).to(dtype), torch.randn(9, 3).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    into = torch.ones(4, 3, dtype=wide)
    dense_wgrad(dy, x, into)
    torch.testing.assert_close(into, 1 + dy.to(wide).t() @ x.to(wide))


def test_grouped_wgrad_overwrites_when_told() -> None:
    offsets = torch.tensor([0, 2, 2], dtype=torch.int32)
    dy, x, into = torch.ones(3, 2), torch.ones(3, 5), torch.full((2, 2, 5), 7.0)
    grouped_wgrad(dy, x, offsets, into, accumulate=False)
    assert into[0].eq(2).all()
    assert into[1].eq(0).all()


def test_a_narrower_sum_is_added_to_as_well() -> None:
    dy, x, into = torch.ones(3, 2), torch.ones(3, 4), torch.ones(2, 4).bfloat16()
    dense_wgrad(dy, x, into)
    assert into.eq(4).all()


@pytest.mark.parametrize("gather", ["none", "dy", "x"])
def test_groups_by_hand(gather: str) -> None:
    torch.manual_seed(0)
    offsets, index = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 1, 1, 2])
    dy, x = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    into = torch.ones(3, 4, 3, dtype=torch.float64)
    options = {} if gather == "none" else {f"{gather}_index_M": index}
    grouped_wgrad(dy, x, offsets, into, **options)
    rows_dy, rows_x = dy[index] if gather == "dy" else dy, x[index] if gather == "x" else x
    for expert, (start, stop) in enumerate([(0, 2), (2, 2), (2, 5)]):
        torch.testing.assert_close(into[expert], 1 + rows_dy[start:stop].t() @ rows_x[start:stop])


def fits(monkeypatch: pytest.MonkeyPatch, accumulate: bool = True, **change: Any) -> bool:
    monkeypatch.setattr(grouped_gemm, "device_fits", lambda _: True)
    operands = {"dy": torch.zeros(8, 16).bfloat16(), "x": torch.zeros(8, 24).bfloat16()}
    operands |= {"into": torch.zeros(3, 16, 24)} | change
    return wgrad_fits(operands["dy"], operands["x"], operands["into"], accumulate)


def test_which_operands_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.zeros(3, 16, 24).bfloat16()
    assert fits(monkeypatch)
    assert fits(monkeypatch, accumulate=False, into=half)
    assert not fits(monkeypatch, into=half), "the copy engine adds fp32 alone"
    assert not fits(monkeypatch, dy=torch.zeros(8, 16))
    assert not fits(monkeypatch, dy=torch.zeros(8, 16).half()), "both of one type"
    assert not fits(monkeypatch, x=torch.zeros(8, 25).bfloat16()[:, 1:])
    assert not fits(monkeypatch, x=torch.zeros(24, 8).bfloat16().t())
    assert not fits(monkeypatch, into=torch.zeros(3, 24, 16).transpose(1, 2))
    assert not fits(monkeypatch, into=torch.zeros(3, 12, 24))
    assert not fits(monkeypatch, dy=torch.zeros(0, 16).bfloat16())
    assert not wgrad_fits(torch.zeros(8, 16), torch.zeros(8, 24), half, True)


@pytest.mark.parametrize("gather", ["none", "dy", "x"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_dividing_warps_are_given(
    gather: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need a Hopper GPU; here only the launch is looked at."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from moeclipse.ops.triton import wgrad_gluon

    seen: list[tuple[Any, dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            assert grid == (2,), "as many programs as there are multiprocessors"
            return lambda *given, **options: seen.append((given, options))

    monkeypatch.setattr(wgrad_gluon, "grouped_wgrad", Kernel())
    monkeypatch.setattr(grouped_gemm, "has_warpgroups", lambda _: True)
    dy, x = torch.zeros(12, 160).bfloat16(), torch.zeros(12, 272).bfloat16()
    offsets, index = torch.tensor([0, 7, 12], dtype=torch.int32), torch.arange(12, dtype=torch.int32)
    into = torch.zeros(2, 160, 272)
    options = {} if gather == "none" else {f"{gather}_index_M": index}
    tile = Tile(stages=4, split=4, staging=2)
    grouped_gemm.grouped_wgrad_kernel(dy, x, offsets, into, accumulate=accumulate, tile=tile, **options)
    (given_dy, given_x, given_index, stride, out, *sizes), constants = seen[0]
    assert (given_dy is dy, given_x is x) == (gather == "dy", gather == "x"), "the others are descriptors"
    assert given_index is (None if gather == "none" else index)
    assert stride == {"dy": 160, "x": 272, "none": 272}[gather] // 8, "in pieces of 16 bytes"
    assert list(out.block_shape) == [1, 64, tile.n // tile.split]
    assert sizes[0] is offsets
    assert sizes[1:] == [2, 160, 272]
    if gather != "dy":
        assert list(given_dy.block_shape)[-2:] == [tile.k, tile.m // 2]
    if gather != "x":
        assert list(given_x.block_shape)[-2:] == [tile.k, tile.n]
    assert (constants["GATHER"], constants["ADD"], constants["BUFFERS"]) == (gather, accumulate, 2)


def test_the_kernel_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    rows: Any = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(grouped_gemm, "wgrad_fits", lambda *_: True)
    monkeypatch.setattr(grouped_gemm, "grouped_wgrad_kernel", lambda *given, **_: taken.append(given[0]))
    grouped_wgrad(rows, torch.ones(1, 1), torch.tensor([0, 1]), torch.ones(1, 1, 1))
    assert taken == [rows]


@pytest.mark.parametrize("gather", ["none", "dy", "x"])
def test_the_kernel_equals_the_reference(gather: str) -> None:
    assert_equal_references("wgrad", f"wgrad unused {gather}")
