"""Launches of the experts' kernels: tiles that there are, and blocks that hold an adapter's rank."""

from __future__ import annotations

import pytest
import torch
from interpreted import assert_equal_references

from moeclipse.ops.architecture import ARCHITECTURES
from moeclipse.ops.expert_kernels import WIDEST_BLOCK, More, _narrow, columns_of, line_of, tile_of
from moeclipse.ops.grouping import Grouping
from moeclipse.ops.tuning import HOPPER


@pytest.mark.parametrize("kernel", ["up", "up, no gate", "down", "d_hidden", "d_rows"])
def test_a_product_with_an_adapter_has_a_tile_of_its_own(kernel: str) -> None:
    more = More(torch.zeros(1, 16), torch.zeros(1, 8, 16))
    assert line_of(kernel, None) == kernel
    tile = HOPPER[line_of(kernel, more)]
    columns = 2 * tile.n if kernel == "up" else tile.n
    stages = tile.stages * (tile.m + columns) * tile.k * 2
    narrow = (tile.m + columns) * WIDEST_BLOCK * 2
    assert stages + narrow + tile.m * tile.n // tile.split <= ARCHITECTURES["sm_90"].shared


@pytest.mark.parametrize(("rank", "columns"), [(8, 16), (16, 16), (24, 32), (64, 64), (72, 128), (256, 256)])
def test_a_block_holds_the_rank(rank: int, columns: int) -> None:
    assert columns_of(rank) == columns
    assert _narrow(More(torch.zeros(1, rank), torch.zeros(0))) == (rank, min(columns, WIDEST_BLOCK))


def test_without_an_adapter() -> None:
    assert _narrow(None) == (0, 16)


def test_kernels_equal_their_references() -> None:
    assert_equal_references("experts", "u ")


def test_few_rows_take_small_tiles() -> None:
    widths = (torch.device("cpu"), 64, 64)
    for rows in (16, 128):
        grouping = Grouping(num_rows=1, tile_rows=rows, counts_E=torch.zeros(3), offsets_E1=torch.zeros(4))
        assert tile_of("up", None, grouping, *widths).m == rows
        assert tile_of("down", None, grouping, *widths).m == rows


def test_kernels_of_few_rows_equal_their_references() -> None:
    assert_equal_references("experts of few rows", "h ", "a ", "y ")
