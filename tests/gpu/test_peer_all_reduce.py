"""All-reduce over the memory of peer GPUs, or of ranks that share one GPU under MPS."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import pytest
import torch

from moeclipse.comm.all_reduce import PeerAllReduce
from moeclipse.comm.all_reduce_table import Choice
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.peer_cuda import HEAD_BYTES, CudaReducer, _open_ipc
from moeclipse.core.errors import CommError
from moeclipse.ops.peer_reduce import rms_norm, sum_ranks_reference
from moeclipse.testing.run_ranks import run_ranks

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 3, 403, 4096, 5001, 262144, 300007, 1 << 22)


def opened(mesh: Mesh, **options: Any) -> PeerAllReduce:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    reduce = PeerAllReduce.open(mesh.world, mesh.watch, torch.device("cuda", 0), choice=Choice(), **options)
    assert reduce.should_use(torch.ones(1, device="cuda")), reduce.obstacle
    return reduce


def inputs(mesh: Mesh, length: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Every rank's input, on every rank: small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    shape = (mesh.num_ranks, length)
    return list(torch.randint(-8, 9, shape, generator=generator).to("cuda", dtype))


def exact(mesh: Mesh) -> int:
    checked = 0
    with opened(mesh, area_bytes=2 << 20) as reduce:
        for length in SIZES:
            for dtype in DTYPES:
                xs = inputs(mesh, length, dtype, length)
                expected = sum_ranks_reference(xs)
                for stages in (1, 2):
                    x = xs[mesh.rank].clone()
                    y = reduce.all_reduce(x, stages=stages)
                    x.fill_(99)  # behind the kernel, in stream order
                    z = xs[mesh.rank].clone()
                    reduce.all_reduce(z, out=z, stages=stages)
                    assert torch.equal(y, expected), (length, dtype, stages, (y != expected).sum())
                    assert torch.equal(z, expected), (length, dtype, stages)
                    checked += 1
                odd = torch.zeros(length + 1, device="cuda", dtype=dtype)[1:].copy_(xs[mesh.rank])
                assert torch.equal(reduce.all_reduce(odd), expected), "unaligned"
        reduce.check()
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_are_exact(num_ranks: int) -> None:
    assert run_ranks(num_ranks, exact, device="cuda:0", deadline_s=150) == [48] * num_ranks


def parted(mesh: Mesh) -> int:
    """Equal parts by kernels of their own, others as parts of an all-reduce."""
    P, checked = mesh.num_ranks, 0
    with opened(mesh) as reduce:
        for length in (403, 4096 * P, 16 * P, 48 * P + 7, 1 << 20):
            xs = inputs(mesh, length, torch.bfloat16, length)
            expected = sum_ranks_reference(xs)
            for part in {length // P // 16 * 16, length // P}:
                bounds = [rank * part for rank in range(P)] + [length]
                mine = slice(bounds[mesh.rank], bounds[mesh.rank + 1])
                shard = reduce.reduce_scatter(xs[mesh.rank], bounds)
                assert torch.equal(shard, expected[mine]), (length, part)
                assert torch.equal(reduce.all_gather(shard, bounds), expected), (length, part)
                checked += 1
        reduce.check()
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_are_scattered_and_gathered(num_ranks: int) -> None:
    found = run_ranks(num_ranks, parted, device="cuda:0", deadline_s=60)
    assert min(found) == max(found) > 5


def bits(mesh: Mesh) -> list[torch.Tensor]:
    """Many rounds of random numbers, with stragglers; every rank's result, as it is."""
    kept = []
    with opened(mesh) as reduce:
        for i in range(60):
            x = torch.randn(
                20011, device="cuda", generator=torch.Generator("cuda").manual_seed(i * 8 + mesh.rank)
            )
            if i % 7 == mesh.rank:
                time.sleep(0.003)
            y = reduce.all_reduce(x.bfloat16(), stages=1 + i % 2)
            kept.append(y.cpu())
    return kept


def test_ranks_and_runs_agree_bit_for_bit() -> None:
    first, *others = run_ranks(4, bits, device="cuda:0", deadline_s=100)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def fused(mesh: Mesh) -> float:
    worst = 0.0
    with opened(mesh) as reduce:
        for T, D in ((1, 64), (37, 1000), (300, 4096)):
            xs = [x.view(T, D) for x in inputs(mesh, T * D, torch.bfloat16)]
            residual = torch.randn(
                T, D, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
            ).bfloat16()
            weight = torch.linspace(0.5, 2, D, device="cuda").bfloat16()
            normed, h = reduce.all_reduce_rms_norm(xs[mesh.rank], residual, weight)
            expected = (sum_ranks_reference([x.float() for x in xs]) + residual).bfloat16()
            assert torch.equal(h, expected)
            wanted = rms_norm(expected.double(), weight.double(), 1e-6)
            worst = max(worst, float(((normed.double() - wanted).abs() / wanted.abs().max()).max()))
    return worst


def test_sum_residual_and_norm_in_one_kernel() -> None:
    assert max(run_ranks(2, fused, device="cuda:0", deadline_s=100)) < 4e-3


def captured(mesh: Mesh) -> list[int]:
    """Small inputs are copied by the kernel, large ones read where they are: one node a call either way."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # its fills would be nodes, too
    P = mesh.num_ranks
    with opened(mesh) as reduce:
        with reduce.capture(torch.bfloat16):
            sizes = (5001, 300000, 700001, 700000)
            x, z, u, t = (torch.zeros(n, device="cuda", dtype=torch.bfloat16) for n in sizes)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                y = reduce.all_reduce(x, stages=1)
                reduce.all_reduce(z, out=z, stages=2)
                w = reduce.all_reduce(y, stages=2)
                v = reduce.all_reduce(u, stages=1)
                reduce.all_reduce(t, out=t, stages=1)  # else peers would read sums where inputs were
                u.fill_(77)  # a peer that still reads it would see this
            nodes = ctypes.c_size_t()
            ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
                ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes)
            )
            shared = len(reduce._reducer.inputs._waiting)
        graph.instantiate()
        for i in range(25):
            xs, zs = inputs(mesh, 5001, torch.bfloat16, i), inputs(mesh, 300000, torch.bfloat16, 100 + i)
            us = inputs(mesh, 700001, torch.bfloat16, 200 + i)
            ts = inputs(mesh, 700000, torch.bfloat16, 300 + i)
            for mine, all_ranks in ((x, xs), (z, zs), (u, us), (t, ts)):
                mine.copy_(all_ranks[mesh.rank])
            if i % 5 == mesh.rank:
                time.sleep(0.002)
            graph.replay()
            if i % 3 == 0:  # eager calls between replays
                assert torch.equal(reduce.all_reduce(xs[mesh.rank]), sum_ranks_reference(xs))
            assert torch.equal(y, sum_ranks_reference(xs))
            assert torch.equal(z, sum_ranks_reference(zs))
            assert torch.equal(w, (sum_ranks_reference(xs).float() * P).bfloat16())
            assert torch.equal(v, sum_ranks_reference(us))
            assert torch.equal(t, sum_ranks_reference(ts))
        reduce.check()
        mesh.barrier()  # inputs outlive their readers
    return [nodes.value, shared]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_graph_replays_with_new_inputs_and_holds_one_node_per_call(num_ranks: int) -> None:
    assert run_ranks(num_ranks, captured, device="cuda:0", deadline_s=100) == [[6, 3]] * num_ranks


def too_early(mesh: Mesh) -> str:
    text = ""
    with opened(mesh) as reduce, reduce.capture(torch.float32):
        x = torch.ones(1 << 18, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reduce.all_reduce(x, label="gradients of layer 3")
        graph.replay()
        try:
            reduce.check()
        except CommError as error:
            text = str(error)
    mesh.barrier()
    return text


def test_a_replay_before_inputs_are_shared_is_an_error() -> None:
    for rank, text in enumerate(run_ranks(2, too_early, device="cuda:0", deadline_s=60)):
        assert text.startswith(f"rank {rank} replayed a graph with gradients of layer 3 before its inputs")


def over_ipc(mesh: Mesh) -> bool:
    torch.cuda.set_device(0)
    memory = _open_ipc(mesh.world, mesh.watch, torch.device("cuda", 0), HEAD_BYTES + (2 << 20), "test")
    reducer = CudaReducer(memory, mesh.world, mesh.watch, 1 << 20)
    xs = inputs(mesh, 300007, torch.float32)
    out = torch.empty_like(xs[0])
    same = True
    for two in (False, True, True, False):
        reducer.all_reduce(xs[mesh.rank], out.fill_(7), two, 0, "test")
        same = same and torch.equal(out, sum_ranks_reference(xs))
    reducer.close()
    mesh.barrier()  # a buffer outlives its readers
    return same


def test_cuda_ipc_serves_where_symmetric_memory_does_not() -> None:
    assert run_ranks(2, over_ipc, device="cuda:0", deadline_s=60) == [True, True]


def late(mesh: Mesh) -> str:
    with opened(mesh) as reduce:
        x = torch.ones(100, device="cuda")
        reduce.all_reduce(x)
        reduce.check()
        if mesh.rank == 1:
            time.sleep(4)
            return ""
        reduce.all_reduce(x, label="gradients of layer 3")
        with pytest.raises(CommError) as caught:
            reduce.check()
        return str(caught.value)


def test_a_missing_rank_is_named_at_the_deadline() -> None:
    texts = run_ranks(2, late, device="cuda:0", collective_deadline_s=1.0, deadline_s=60)
    assert texts[0] == "rank 0 waited 1 s in gradients of layer 3: rank 1 did not arrive"
