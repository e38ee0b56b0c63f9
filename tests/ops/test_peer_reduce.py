"""Sums in rank order, how a kernel is launched, and the kernels themselves on Triton's interpreter."""

from __future__ import annotations

import ctypes
import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import assert_peers_ran

import moeclipse.ops.triton
from moeclipse.core.errors import ConfigError
from moeclipse.ops import peer_reduce
from moeclipse.ops.cuda_driver import CudaDriver
from moeclipse.ops.peer_reduce import (
    ONE,
    TWO,
    AllReduceKernel,
    Launch,
    Launcher,
    PeerSpace,
    add_residual,
    checked_bounds,
    name_of,
    one_size_for_each_tile,
    part_bounds,
    rms_norm,
    sum_ranks,
    sum_ranks_reference,
    tile_of,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_are_added_in_order_and_rounded_once(num_ranks: int, dtype: torch.dtype) -> None:
    """1 + 3 x 2^-9 rounds up in bf16 only if nothing was rounded on the way."""
    parts = [torch.full((20000,), 1.0 if rank == 0 else 2.0**-9).to(dtype) for rank in range(num_ranks)]
    parts[-1][10:] = torch.randn(19990).to(dtype)
    out = torch.empty(20000, dtype=dtype)
    assert torch.equal(sum_ranks(parts, out), sum_ranks_reference(parts))


def test_the_last_rank_takes_the_remainder() -> None:
    assert part_bounds(403, 4) == [0, 100, 200, 300, 403]
    assert part_bounds(3, 4) == [0, 0, 0, 0, 3]


def test_tiles_keep_blocks_busy() -> None:
    sizes = (1, 1024, 1025, 8192, 8193, 16384)
    assert [tile_of(n << 10, 64, 2) >> 10 for n in sizes] == [8, 8, 32, 32, 64, 64]
    assert [tile_of(n << 10, 33, 4) >> 10 for n in (64, 512, 1024, 16384)] == [8, 8, 32, 64]
    assert tile_of(16384 << 10, 16, 8) == 32 << 10, "more do not fit into registers"
    for blocks, num_ranks in ((64, 2), (33, 4), (16, 8)):
        chosen = {tile_of(n, blocks, num_ranks) for n in range(4 << 10, 32 << 20, 4 << 10)}
        assert {tile_of(n, blocks, num_ranks) for n in one_size_for_each_tile(blocks)} == chosen


def compiled(num_parameters: int) -> Any:
    return SimpleNamespace(
        asm={"ptx": ".entry f(" + ".param .u64 a, " * num_parameters + ")"},
        metadata=SimpleNamespace(num_warps=16, shared=0),
        function=1,
    )


def test_a_launch_keeps_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gets addresses of them, which must not outlive them."""
    seen: list[list[int]] = []

    def driver(_config: object, _function: object, arguments: Any, _extra: object) -> int:
        seen.append([ctypes.c_int32.from_address(address).value for address in arguments])
        return 0

    library = CudaDriver(SimpleNamespace(cuLaunchKernelEx=driver))
    monkeypatch.setattr(peer_reduce, "cuda_driver", lambda: library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    first = Launcher(compiled(14), 0, list(range(14)), 6)
    launch = first.again(Launch(first, 64, 102, 106, 107, 108)).launch
    gc.collect()
    garbage = [ctypes.c_uint64(77) for _ in range(1000)]
    launch(100, 101)
    first.launch(200, 201)
    assert len(garbage) == 1000
    assert seen == [[100, 101, 102, 3, 4, 5, 106, 107, 108, *range(9, 14)], [200, 201, *range(2, 14)]]


@pytest.mark.parametrize("bounds", [[0, 100, 200], [0, 5, 4, 403], [1, 100, 200, 403], [0, 100, 200, 402]])
def test_bounds_that_do_not_grow_to_the_end_are_named(bounds: list[int]) -> None:
    assert checked_bounds(None, 403, 3) == [0, 134, 268, 403]
    assert checked_bounds((0, 0, 403, 403), 403, 3) == [0, 0, 403, 403], "a part may be empty"
    with pytest.raises(ConfigError, match=r"must be 4 numbers that grow from 0 to 403"):
        checked_bounds(bounds, 403, 3)


def test_the_residual_comes_behind_the_ranks_and_rows_are_normed() -> None:
    parts = [torch.tensor([[3.0, -4.0]]).bfloat16(), torch.tensor([[0.0, 1.0]]).bfloat16()]
    before = [part.clone() for part in parts]
    h = add_residual(parts, torch.tensor([[1.0, -1.0]]).bfloat16())
    assert h.tolist() == [[4.0, -4.0]]
    assert all(map(torch.equal, parts, before)), "they lie where others still read them"
    normed = rms_norm(h, torch.tensor([1.0, 2.0]), 0.0)
    assert normed.tolist() == [[1.0, -2.0]]
    assert normed.dtype == torch.bfloat16


def test_a_launch_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CudaDriver(SimpleNamespace(cuLaunchKernelEx=lambda *_: 700, cuGetErrorString=lambda *_: 1))
    monkeypatch.setattr(peer_reduce, "cuda_driver", lambda: library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 5, raising=False)
    launcher = Launcher(compiled(16), 0, list(range(14)), 6)
    with pytest.raises(RuntimeError, match="the launch of the all-reduce kernel failed with code 700"):
        launcher.launch(1, 2)
    assert launcher._config.stream == 5
    with pytest.raises(RuntimeError, match="the kernel takes 17 arguments, expected 14"):
        Launcher(compiled(17), 0, list(range(14)), 6)


class Triton:
    """Stands for the kernel: notes its launches, and gives something compiled, or nothing."""

    def __init__(self, gives: Any) -> None:
        self.gives, self.launches = gives, list[tuple[Any, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any, **options: Any) -> Any:
            self.launches.append((grid, values, options))
            return self.gives

        return launch


def space() -> PeerSpace:
    return PeerSpace(
        table=torch.tensor([256, 512]), counts=torch.zeros(4, dtype=torch.int32),
        status=torch.zeros(1, dtype=torch.int32), area_bytes=1 << 20, head_bytes=8192, limit_us=1000,
        rank=1, num_ranks=2, max_blocks=4,
    )  # fmt: skip


@pytest.mark.parametrize("takes", [16, 99], ids=["through the driver", "through Triton"])
def test_a_kernel_is_compiled_once_and_then_launched_by_the_driver(
    takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = Triton(compiled(takes))
    kernels = SimpleNamespace(all_reduce=triton)
    monkeypatch.setitem(sys.modules, "moeclipse.ops.triton.peer_reduce", kernels)
    monkeypatch.setattr(moeclipse.ops.triton, "peer_reduce", kernels, raising=False)
    grids: list[int] = []

    def driver(config: Any, *_: Any) -> int:
        grids.append(config._obj.grid[0])
        return 0

    library = CudaDriver(SimpleNamespace(cuLaunchKernelEx=driver))
    monkeypatch.setattr(peer_reduce, "cuda_driver", lambda: library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    kernel, x = AllReduceKernel(space()), torch.zeros(5000)
    out = torch.empty_like(x)
    for _ in range(3):
        kernel(x, out, ONE)
    assert len(triton.launches) == (1 if takes == 16 else 3)
    assert grids == ([3, 3] if takes == 16 else []), "5000 x 4 bytes in tiles of 8 KiB"
    kernel(x, out, TWO)
    kernel(x[1:], out[1:], TWO)
    assert len(triton.launches) == (3 if takes == 16 else 5), "another kernel for each"
    (grid, values, _) = triton.launches[0]
    assert (grid, values[0] is x, values[1] is out) == ((3, 1, 1), True, True)
    assert values[6:9] == (5000, 2496, name_of(ONE, torch.float32, 5000, None)), "parts are whole vectors"


def test_ranks_that_call_something_else_have_another_name() -> None:
    calls = [(ONE, torch.float32, 8, None), (TWO, torch.float32, 8, None), (ONE, torch.float32, 9, None)]
    names = {name_of(*call) for call in [*calls, (ONE, torch.float32, 8, ("shared", 1, 0))]}
    assert len(names) == 4
    assert all(0 <= name < 1 << 31 for name in names)


def test_the_kernels_on_the_interpreter() -> None:
    assert_peers_ran()
