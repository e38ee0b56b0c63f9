"""All-reduce over the memory of peer GPUs, or of ranks that share one GPU under MPS."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.all_reduce import PeerAllReduce
from moeclipse.comm.reduce.on_device import HEAD_BYTES, CudaReducer
from moeclipse.comm.reduce.table import Algorithm
from moeclipse.comm.shared.device import _open_ipc
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.ops.peer_reduce import rms_norm, sum_ranks_reference
from moeclipse.testing.run_ranks import run_ranks

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
peer_reduce = pytest.importorskip("moeclipse.ops.triton.peer_reduce")

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 3, 403, 4096, 5001, 262144, 300007, 1 << 22)


def opened(mesh: Mesh, **options: Any) -> PeerAllReduce:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    options = {"choice": Algorithm()} | options
    reduce = PeerAllReduce.open(mesh.world, mesh.watch, torch.device("cuda", 0), **options)
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
                spread = torch.zeros(2 * length, device="cuda", dtype=dtype)
                reduce.all_reduce(xs[mesh.rank], out=spread[::2])
                assert torch.equal(spread[::2], expected), "every second element"
                assert spread[1::2].eq(0).all(), "and no other"
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


ALL_IN_PLACE = Algorithm(in_place_from=0)
SHARED_SIZES = (1, 403, 5001, 262144, 300007, (1 << 22) + 3)


def shared_exact(mesh: Mesh) -> int:
    """Inputs change between calls and are overwritten right after; stragglers; plain tensors in between."""
    checked = 0
    with opened(mesh, area_bytes=2 << 20, choice=ALL_IN_PLACE) as reduce:
        for length in SHARED_SIZES:
            for dtype in DTYPES:
                x = reduce.share(torch.empty(length, device="cuda", dtype=dtype))
                given = torch.empty_like(x)
                assert reduce.should_use(x).why == "peers read it where it lies"
                for turn in range(3):
                    xs = inputs(mesh, length, dtype, length + turn)
                    mine, expected = xs[mesh.rank], sum_ranks_reference(xs)
                    for stages in (1, 2):
                        if (turn + stages) % mesh.num_ranks == mesh.rank:
                            torch.cuda._sleep(200_000)  # the device lags, too
                        x.copy_(mine)
                        y = reduce.all_reduce(x, stages=stages)
                        x.copy_(mine + 1)  # behind the kernel, in stream order
                        reduce.all_reduce(x, out=given, stages=stages)
                        x.copy_(mine)
                        reduce.all_reduce(x, out=x, stages=stages)
                        z = x.clone()
                        x.fill_(99)
                        plain = reduce.all_reduce(mine, stages=stages)
                        where = (length, dtype, turn, stages)
                        assert torch.equal(y, expected), ("new", *where, (y != expected).sum())
                        assert torch.equal(z, expected), ("in place", *where)
                        assert torch.equal(plain, expected), ("plain", *where)
                        one_more = sum_ranks_reference([one + 1 for one in xs])
                        assert torch.equal(given, one_more), ("given", *where)
                        checked += 1
                reduce.unshare(x)
        reduce.check()
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_of_shared_tensors_are_exact(num_ranks: int) -> None:
    found = run_ranks(num_ranks, shared_exact, device="cuda:0", deadline_s=150)
    assert found == [len(SHARED_SIZES) * 3 * 6] * num_ranks


@triton.jit
def slow_input_of(inputs, peer, like):  # type: ignore[no-untyped-def]
    """As `input_of`, some microseconds later."""
    address = tl.load(inputs + peer)
    later = tl.inline_asm_elementwise(
        "nanosleep.u32 30000; mov.u64 $0, $1;", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.multiple_of(later.to(tl.pointer_type(like.dtype.element_ty)), 16)


def overwritten(mesh: Mesh) -> int:
    """One rank reads slowly: nobody may leave, and overwrite its input, before all have read it."""
    if mesh.rank == 1:
        peer_reduce.input_of = slow_input_of
    wrong, length, P = 0, 1 << 18, mesh.num_ranks
    with opened(mesh, choice=ALL_IN_PLACE) as reduce:
        x = reduce.share(torch.empty(length, device="cuda"))
        out = torch.empty_like(x)
        for turn in range(10):
            for stages in (1, 2):
                x.fill_(turn + mesh.rank)
                reduce.all_reduce(x, out=out, stages=stages)
                x.fill_(-1000)
                wrong += int((out != P * turn + P * (P - 1) // 2).sum())
        reduce.check()
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_shared_tensor_may_be_overwritten_behind_the_call(num_ranks: int) -> None:
    assert run_ranks(num_ranks, overwritten, device="cuda:0", deadline_s=60) == [0] * num_ranks


def views(mesh: Mesh) -> int:
    """Parts of a shared tensor, results in another part of it, and a graph of its own."""
    with opened(mesh, area_bytes=1 << 20, choice=ALL_IN_PLACE) as reduce:
        base = reduce.share(torch.empty(8, 1 << 16, device="cuda", dtype=torch.bfloat16))
        graph = None
        for turn in range(3):
            xs = [x.view_as(base) for x in inputs(mesh, base.numel(), torch.bfloat16, turn)]
            expected = sum_ranks_reference(xs)
            base.copy_(xs[mesh.rank])
            assert reduce.is_shared(base[3])
            assert torch.equal(reduce.all_reduce(base[3:5]), expected[3:5])
            odd = base.view(-1)[1:1001]
            assert not reduce.is_shared(odd), "it begins in the middle of a vector"
            assert torch.equal(reduce.all_reduce(odd), expected.view(-1)[1:1001])
            assert torch.equal(reduce.all_reduce(base.t()), expected.t()), "not contiguous, so copied"
            flat = base.view(-1)
            with pytest.raises(ConfigError, match="out begins within the input"):
                reduce.all_reduce(flat[:4096], out=flat[2048:6144])
            reduce.all_reduce(flat[:4096], out=flat[4096:8192])
            assert torch.equal(flat[4096:8192], expected.view(-1)[:4096])
            base.copy_(xs[mesh.rank])
            assert torch.equal(reduce.all_reduce(base[0]), expected[0])
            if graph is None:  # its row is there, and so is the kernel: no capture() is needed
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    made = reduce.all_reduce(base[0])
            graph.replay()
            assert torch.equal(made, expected[0])
        reduce.check()
        rows = reduce._reducer.inputs._used
        reduce.unshare(base)
        assert not reduce.is_shared(base)
        assert torch.equal(reduce.all_reduce(base), expected)
        again = reduce.share(torch.empty_like(base).copy_(xs[mesh.rank]))
        assert torch.equal(reduce.all_reduce(again), expected)
        assert reduce._reducer.inputs._used == rows, "rows are used again"
    return 1


def test_parts_of_shared_tensors() -> None:
    assert run_ranks(3, views, device="cuda:0", deadline_s=60) == [1] * 3


def reallocated(mesh: Mesh) -> int:
    """Another tensor at the address of one that was shared is not taken for it."""
    with opened(mesh, choice=ALL_IN_PLACE) as reduce:
        found, shape = 0, (1 << 20) + 1024 * mesh.rank
        for turn in range(6):
            size = 1 << 20
            xs = inputs(mesh, size, torch.float32, turn)
            expected = sum_ranks_reference(xs)
            held = torch.cuda.memory_allocated()
            x = reduce.share(torch.empty(size, device="cuda"))
            address = x.data_ptr()
            x.copy_(xs[mesh.rank])
            assert torch.equal(reduce.all_reduce(x), expected)
            kept = x.untyped_storage()._cdata
            del x
            y = torch.empty(shape, device="cuda")[:size].copy_(xs[mesh.rank])
            assert y.data_ptr() != address, "what is shared is kept"
            assert torch.equal(reduce.all_reduce(y), expected)
            x = reduce._reducer.inputs._shares[address].x
            assert x.untyped_storage()._cdata == kept
            reduce.unshare(x)
            del x, y
            assert torch.cuda.memory_allocated() == held, "and let go of"
            y = torch.empty(size, device="cuda").copy_(xs[mesh.rank])
            found += y.data_ptr() == address
            assert not reduce.is_shared(y)
            assert torch.equal(reduce.all_reduce(y), expected)
            if turn % 2:  # shared anew, beside a peer whose tensor lies elsewhere
                y = torch.empty(size + 4 * mesh.rank, device="cuda")[4 * mesh.rank :].copy_(xs[mesh.rank])
                reduce.unshare(reduce.share(y))
                reduce.share(y)
                assert torch.equal(reduce.all_reduce(y), expected)
                reduce.unshare(y)
            del y
        reduce.check()
    return found


def test_another_tensor_at_the_same_address_is_not_shared() -> None:
    assert all(run_ranks(2, reallocated, device="cuda:0", deadline_s=60)), "an address came back"


def mixed_up(mesh: Mesh) -> list[str]:
    texts = []
    for case in range(4):
        with opened(mesh, choice=ALL_IN_PLACE) as reduce:
            a, b = (reduce.share(torch.ones(1 << 16, device="cuda")) for _ in range(2))
            for x in (a, b, a.clone(), b[:1024], a[:-16]):
                reduce.all_reduce(x)
                reduce.all_reduce(x)
            reduce.check()
            mesh.barrier()
            begun = time.monotonic()
            other = (b, a.clone(), b[:1024], a[:-16])[case]
            reduce.all_reduce(other if mesh.rank else a, label="gradients of layer 3")
            try:
                reduce.check()
                texts.append("")
            except CommError as error:
                texts.append(str(error))
            time.sleep(max(0.0, begun + 3 - time.monotonic()))  # a rank that waits does so to its deadline
    return texts


def test_ranks_that_pass_tensors_that_do_not_belong_together_are_told() -> None:
    """Another shared one, one that is not, another part, a shorter one: whoever comes last is told."""
    texts = run_ranks(2, mixed_up, device="cuda:0", collective_deadline_s=2.0, deadline_s=60)
    said = ["ranks 0 and 1 made different calls, in gradients", "ranks 1 and 0 made different calls, in grad"]
    for pair in zip(*texts, strict=True):
        assert any(text.startswith(one) for text, one in zip(pair, said, strict=True)), pair


def refused(mesh: Mesh) -> None:
    with opened(mesh) as reduce:
        x = torch.ones(1 << 20, device="cuda")
        for wrong, why in (
            (x[: 1 << 19] if mesh.rank else x, "rank 1 shares 524288 x float32, rank 0 1048576 x float32"),
            (x[1:], "cannot share 1048575 x float32: it does not begin on a multiple of 16 bytes"),
            (x.view(1024, 1024).t(), "it is empty, or not contiguous"),
        ):
            with pytest.raises(ConfigError, match=why):
                reduce.share(wrong)
        reduce.share(x)
        with pytest.raises(ConfigError, match="it overlaps one that is shared"):
            reduce.share(x[1024:2048])
        other = reduce.share(torch.ones(16, device="cuda"))
        with pytest.raises(ConfigError, match="were shared: rank 0 tensor 1, rank 1 tensor 2"):
            reduce.unshare(other if mesh.rank else x)
        with pytest.raises(ConfigError, match="rank 0 one that is not, rank 1 one that is not"):
            reduce.unshare(torch.ones(5, device="cuda"))
        assert reduce.is_shared(x)
        assert not reduce.is_shared(other), "too small to pay"
        assert torch.equal(reduce.all_reduce(x), 2 * x), "mistakes that all ranks see harm nothing"


def test_mistakes_in_sharing_are_named_on_all_ranks() -> None:
    run_ranks(2, refused, device="cuda:0", deadline_s=60)


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
