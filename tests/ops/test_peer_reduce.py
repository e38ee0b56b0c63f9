"""Sums in rank order, how a kernel is launched, and the kernels themselves on Triton's interpreter."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeclipse.ops import peer_reduce
from moeclipse.ops.cuda_driver import CudaDriver
from moeclipse.ops.peer_reduce import (
    Launch,
    Launcher,
    one_size_for_each_tile,
    part_bounds,
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


def test_a_launch_keeps_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gets addresses of them, which must not outlive them."""
    seen: list[list[int]] = []

    def driver(_config: object, _function: object, arguments: Any, _extra: object) -> int:
        seen.append([ctypes.c_int32.from_address(address).value for address in arguments])
        return 0

    library = CudaDriver(SimpleNamespace(cuLaunchKernelEx=driver))
    monkeypatch.setattr(peer_reduce, "cuda_driver", lambda: library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    compiled = SimpleNamespace(
        asm={"ptx": ".entry f(" + ".param .u64 a, " * 14 + ")"},
        metadata=SimpleNamespace(num_warps=16, shared=0),
        function=1,
    )
    first = Launcher(compiled, 0, list(range(14)), 6)
    launch = first.again(Launch(first, 64, 102, 106, 107, 108)).launch
    gc.collect()
    garbage = [ctypes.c_uint64(77) for _ in range(1000)]
    launch(100, 101)
    first.launch(200, 201)
    assert len(garbage) == 1000
    assert seen == [[100, 101, 102, 3, 4, 5, 106, 107, 108, *range(9, 14)], [200, 201, *range(2, 14)]]


INTERPRETED = """
import time
import torch
import triton.language as tl
from moeclipse.comm.shared.host import PeerMemory
from moeclipse.ops.peer_reduce import AllReduceKernel, PeerSpace, all_reduce_rms_norm_kernel, rms_norm
from moeclipse.testing.run_ranks import run_ranks

def inputs_of(P, length):
    return list(torch.randint(-8, 9, (P, length), generator=torch.Generator().manual_seed(length)).float())

def kernels(mesh):
    from moeclipse.ops.triton import peer_reduce
    # Inline assembly is not interpreted.
    peer_reduce.poll = lambda flags: tl.load(flags, volatile=True)
    peer_reduce.clock = lambda lane: lane.to(tl.int64) * 0
    if mesh.rank == 1:  # a slow reader: nobody may leave, and overwrite its input, before it has read that
        quick = peer_reduce.input_of
        peer_reduce.input_of = lambda *given: (time.sleep(0.02), quick(*given))[1]
    P, area = mesh.num_ranks, 1 << 16
    memory = PeerMemory.open(mesh.world, mesh.watch, num_bytes=8192 + 3 * area, num_words=1)
    addresses = [memory.view(peer, torch.uint8, 0, 8).data_ptr() for peer in range(P)]
    row = torch.tensor([address + 8192 + 2 * area for address in addresses])
    space = PeerSpace(
        table=torch.tensor(addresses), counts=torch.zeros(4, dtype=torch.int32),
        status=torch.zeros(1, dtype=torch.int32), area_bytes=area,
        head_bytes=8192, limit_us=1 << 30, rank=mesh.rank, num_ranks=P, max_blocks=4,
    )
    kernel = AllReduceKernel(space)
    for length in (3, 5001):
        for kind in (1, 2):
            for inputs in (None, row):
                xs = inputs_of(P, length)
                x = memory.view(mesh.rank, torch.float32, 8192 + 2 * area, length).copy_(xs[mesh.rank])
                out = torch.full((length,), 7.0)
                kernel(x, out, kind, inputs)
                x.fill_(99)  # in place: all peers have read it
                assert torch.equal(out, sum(xs)), (length, kind, inputs)
    for kind in (1, 2):  # an input that begins in the middle of a vector
        xs = [(kind + 2) * x for x in inputs_of(P, 5001)]  # areas still hold what was there before
        odd = torch.zeros(5002)[1:].copy_(xs[mesh.rank])
        assert odd.data_ptr() % 16
        kernel(odd, out.fill_(7), kind)
        assert torch.equal(out, sum(xs)), ("odd", kind)
        kernel(odd, odd, kind)
        assert torch.equal(odd, sum(xs)), ("odd, in place", kind)
    xs, part = inputs_of(P, 5001), 5001 // P // 16 * 16
    bounds = [rank * part for rank in range(P)] + [5001]
    mine = torch.full((bounds[mesh.rank + 1] - bounds[mesh.rank],), 7.0)
    kernel(xs[mesh.rank], mine, 3)
    assert torch.equal(mine, sum(xs)[bounds[mesh.rank] : bounds[mesh.rank + 1]])
    whole = torch.full((5001,), 7.0)
    kernel(mine, whole, 4)
    assert torch.equal(whole, sum(xs))
    kernel(x, out.fill_(7), 2, torch.zeros(P, dtype=torch.int64))
    assert out.eq(7).all() and space.status.tolist() == [1000], "not registered: nothing happens"
    xs = [x.view(5, 100) for x in inputs_of(P, 500)]
    normed, h = torch.empty(5, 100), torch.empty(5, 100)
    weight = torch.linspace(1, 2, 100)
    all_reduce_rms_norm_kernel(xs[mesh.rank], torch.ones(5, 100), weight, 1e-6, (normed, h), space)
    assert torch.equal(h, sum(xs) + 1)
    assert torch.allclose(normed, rms_norm(h, weight, 1e-6))
    rounds = space.counts.tolist()
    space.status.zero_()
    mesh.barrier()
    # Rank 0 calls something else.
    kernel(x[:48], out[:48], 1 if mesh.rank else 2, row, "x")
    mesh.barrier()
    return rounds + space.status.tolist()

torch.set_num_threads(1)
# 2 x (1 + 2) rounds, of inputs where they lie 2 x (2 + 2), 2 x (1 + 2), 1, 1 and 1
found = run_ranks(3, kernels)
assert [rounds for *rounds, _ in found] == [[23] * 4] * 3
first, *others = [status for *_, status in found]
# Of two ranks whose calls differ at least the later one is told; codes are 101 + the peer.
assert set(others) <= {0, 101} and first in (0, 102, 103) and (first or others == [101, 101]), found
"""


def test_the_device_kernels_on_the_interpreter() -> None:
    pytest.importorskip("triton")
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
