"""All-reduce over shared memory: exact, the same bits everywhere, any length, and clear when it cannot be."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_files import left_over

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.all_reduce import PeerAllReduce
from moeclipse.comm.reduce.table import (
    Algorithm,
    key_of,
    write_algorithm,
)
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.ops.peer_reduce import (
    add_residual,
    part_bounds,
    rms_norm,
    sum_ranks_reference,
)
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (1, 2, 3, 7, 403, 1000, 4097, 65537, 300001)


def opened(mesh: Mesh, **options: Any) -> PeerAllReduce:
    return PeerAllReduce.open(mesh.world, mesh.watch, **({"choice": Algorithm()} | options))


def integers(mesh: Mesh, length: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Every rank's input, on every rank: small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(-8, 9, (mesh.num_ranks, length), generator=generator).to(dtype))


def exact(mesh: Mesh, sizes: tuple[int, ...], area_bytes: int) -> int:
    """In and out of place, one and two stages, input overwritten right after the call, stragglers."""
    lots, checked = random.Random(mesh.rank), 0
    with opened(mesh, area_bytes=area_bytes) as reduce:
        for length in sizes:
            for dtype in DTYPES:
                xs = integers(mesh, length, dtype, length)
                expected = sum_ranks_reference(xs)
                for stages in (1, 2):
                    x = xs[mesh.rank].clone()
                    if lots.random() < 0.05:
                        time.sleep(lots.random() * 0.003)
                    y = reduce.all_reduce(x, stages=stages)
                    x.fill_(99)
                    z = xs[mesh.rank].clone()
                    assert reduce.all_reduce(z, out=z, stages=stages) is z
                    assert torch.equal(y, expected), (length, dtype, stages)
                    assert torch.equal(z, expected), (length, dtype, stages)
                    checked += 1
    return checked


@pytest.mark.parametrize(("num_ranks", "area_bytes"), [(2, 4096), (3, 1 << 20), (4, 1 << 20), (8, 1 << 16)])
def test_integers_sum_exactly(num_ranks: int, area_bytes: int) -> None:
    sizes = SIZES if num_ranks < 8 else SIZES[3:-1]
    assert run_ranks(num_ranks, exact, sizes, area_bytes) == [8 * len(sizes)] * num_ranks


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_integers_sum_exactly_at_every_size(num_ranks: int) -> None:
    sizes = (*range(1, 70), *SIZES, (1 << 20) + 1, (1 << 22) - 1, 1 << 22)
    assert run_ranks(num_ranks, exact, sizes, 1 << 20, deadline_s=600)[0] == 8 * len(sizes)


def random_bits(mesh: Mesh) -> list[torch.Tensor]:
    lots, kept = random.Random(100 + mesh.rank), []
    with opened(mesh, area_bytes=8192) as reduce:
        for i in range(60):
            dtype, length = DTYPES[i % 4], (5, 1000, 4099)[i % 3]
            xs = [torch.randn(length, generator=torch.Generator().manual_seed(9 * i + p)) for p in range(4)]
            if lots.random() < 0.1:
                time.sleep(lots.random() * 0.004)
            ys = [reduce.all_reduce(xs[mesh.rank].to(dtype), stages=stages) for stages in (1, 2)]
            assert torch.equal(*ys), "stages"
            assert torch.equal(ys[0], sum_ranks_reference([x.to(dtype) for x in xs]))
            kept.append(ys[0])
    return kept


@pytest.mark.peer_memory
def test_all_ranks_hold_the_same_bits_in_every_run() -> None:
    first, *others = run_ranks(4, random_bits) + run_ranks(4, random_bits)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def scattered(mesh: Mesh, length: int, bounds: list[int] | None, area_bytes: int) -> int:
    with opened(mesh, area_bytes=area_bytes) as reduce:
        xs = integers(mesh, length, torch.bfloat16, 3)
        expected = sum_ranks_reference(xs)
        shard = reduce.reduce_scatter(xs[mesh.rank], bounds)
        whole = bounds or part_bounds(length, mesh.num_ranks)
        assert torch.equal(shard, expected[whole[mesh.rank] : whole[mesh.rank + 1]])
        assert torch.equal(reduce.all_gather(shard, whole), expected)
        return shard.numel()


def test_reduce_scatter_and_all_gather_use_the_same_parts() -> None:
    assert run_ranks(4, scattered, 403, None, 4096) == [100, 100, 100, 103]
    assert run_ranks(3, scattered, 10000, [0, 9000, 9000, 10000], 4096) == [9000, 0, 1000]


def normed(mesh: Mesh, dtype: torch.dtype) -> float:
    worst = 0.0
    for algorithm in (Algorithm(), Algorithm(two_stages_from=0)):
        with opened(mesh, choice=algorithm, area_bytes=8192) as reduce:
            for T, D in ((1, 8), (37, 100), (0, 4)):
                xs = [x.view(T, D) for x in integers(mesh, T * D, dtype, 5)]
                residual = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)
                weight = torch.linspace(0.5, 2, D).to(dtype)
                y, h = reduce.all_reduce_rms_norm(xs[mesh.rank], residual, weight, eps=1e-5)
                assert torch.equal(h, add_residual(xs, residual))
                assert torch.equal(y, rms_norm(h, weight, 1e-5))
                wide = sum(x.double() for x in xs) + residual.double()
                wanted = torch.nn.functional.rms_norm(wide, (D,), weight.double(), 1e-5)
                if T:
                    worst = max(worst, float((y.double() - wanted).abs().max() / wanted.abs().max()))
    return worst


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-6)])
def test_sum_residual_and_norm_together(dtype: torch.dtype, limit: float) -> None:
    assert max(run_ranks(3, normed, dtype)) < limit


def awkward(mesh: Mesh) -> None:
    with opened(mesh) as reduce:
        base = torch.arange(24.0).view(4, 6) * (mesh.rank + 1)
        total = torch.arange(24.0).view(4, 6) * 3
        assert torch.equal(reduce.all_reduce(base.t()), total.t())
        column = base[:, 1:3]
        assert reduce.all_reduce(column, out=column) is column
        assert torch.equal(base[:, 1:3], total[:, 1:3])
        odd = torch.zeros(101)[1:].copy_(torch.arange(100.0))
        assert torch.equal(reduce.all_reduce(odd), torch.arange(100.0) * 2)
        leaf = torch.ones(3, requires_grad=True)
        assert reduce.all_reduce(leaf).tolist() == [2, 2, 2]
        assert reduce.all_reduce(torch.empty(0, 3)).shape == (0, 3)
        assert reduce.all_reduce(torch.tensor(2.0)).item() == 4.0


def test_strides_offsets_and_odd_shapes() -> None:
    run_ranks(2, awkward)


def reasons(mesh: Mesh) -> None:
    with opened(mesh, choice=Algorithm(max_bytes=100)) as reduce:
        assert reduce.should_use(torch.ones(25))
        large, whole = torch.ones(26), torch.ones(3, dtype=torch.int64)
        assert reduce.should_use(large).why == "104 bytes are more than 100, the most in the table"
        assert reduce.should_use(whole).why == "int64 is not one of float32, float16, bfloat16, float64"
        assert "on meta, this all-reduce on cpu" in reduce.should_use(torch.ones(1, device="meta")).why
        # All of these go through torch.distributed.
        assert reduce.all_reduce(large).tolist() == [2.0] * 26
        assert reduce.all_reduce(whole, out=whole) is whole
        assert whole.tolist() == [2, 2, 2]
        assert reduce.reduce_scatter(large).tolist() == [2.0] * 13
        assert reduce.all_gather(torch.ones(13), [0, 13, 26]).tolist() == [1.0] * 26
        y, h = reduce.all_reduce_rms_norm(torch.ones(2, 20), torch.zeros(2, 20), torch.ones(20))
        assert h.tolist() == [[2.0] * 20] * 2
        assert torch.allclose(y, torch.ones(2, 20))
    with opened(mesh, area_bytes=1 << 45) as reduce:
        assert "in /dev/shm" in reduce.should_use(large).why
        assert reduce.all_reduce(large).tolist() == [2.0] * 26


@pytest.mark.peer_memory
def test_should_use_says_why_not_and_the_call_falls_back() -> None:
    run_ranks(2, reasons)


def test_one_rank_needs_no_memory() -> None:
    mesh = Mesh.single()
    with PeerAllReduce.open(mesh.world, mesh.watch) as reduce:
        x = torch.randn(5)
        assert reduce.should_use(x).why == "the group has one rank"
        assert torch.equal(reduce.all_reduce(x), x)


def mistakes(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"area_bytes \(100\) must be a positive multiple of 4096"):
        opened(mesh, area_bytes=100)
    with opened(mesh) as reduce:
        x = torch.ones(4)
        with pytest.raises(ConfigError, match=r"out is torch.float64 \(4,\) on cpu, expected torch.float32"):
            reduce.all_reduce(x, out=torch.ones(4, dtype=torch.float64))
        for good in (False, True):  # a call of this length was made before
            if good:
                reduce.all_reduce(x[:3], out=torch.empty(3))
            with pytest.raises(ConfigError, match="out begins within the input; give the input itself"):
                reduce.all_reduce(x[:3], out=x[1:])
        with pytest.raises(ConfigError, match=r"bounds \[0, 5\] must be 3 numbers that grow from 0 to 4"):
            reduce.reduce_scatter(x, [0, 5])
        with pytest.raises(ConfigError, match=r"has a shard of 4 elements, but bounds \d to \d ask for 2"):
            reduce.all_gather(x, [0, 2, 4])
        with pytest.raises(ConfigError, match=r"do not fit: expected \[..., D\], \[..., D\] and \[D\]"):
            reduce.all_reduce_rms_norm(x.view(2, 2), x.view(2, 2), x)
        with (
            pytest.raises(
                ConfigError, match="for CUDA graphs over peer memory: this all-reduce is on the cpu"
            ),
            reduce.capture(),
        ):
            pass
        assert reduce.all_reduce(x).tolist() == [2.0] * 4, "a mistake that all ranks see harms nothing"
    with pytest.raises(CommError, match="cannot be used any more: it was closed; open a new one"):
        reduce.all_reduce(x)


@pytest.mark.peer_memory
def test_mistakes_are_named_before_any_rank_waits() -> None:
    run_ranks(2, mistakes)


def swapped(mesh: Mesh) -> str:
    with opened(mesh) as reduce:
        x = torch.ones(8)
        call = partial(reduce.reduce_scatter, x.bfloat16()) if mesh.rank else partial(reduce.all_reduce, x)
        with pytest.raises(CommError) as caught:
            call(label="loss")
        with pytest.raises(CommError, match="cannot be used any more: rank"):
            reduce.all_reduce(x)
        return str(caught.value)


@pytest.mark.peer_memory
def test_ranks_that_make_different_calls_are_told() -> None:
    assert run_ranks(2, swapped)[0] == (
        "rank 0 is in loss with all-reduce of 8 x float32, "
        "but rank 1 came with reduce-scatter of 8 x bfloat16; all ranks must make the same calls"
    )


def two_threads(mesh: Mesh) -> str:
    with opened(mesh) as reduce:
        caught: list[str] = []
        if mesh.rank == 0:
            other = threading.Thread(target=lambda: reduce.all_reduce(torch.ones(3)))
            other.start()
            time.sleep(0.2)  # it waits for rank 1
            with pytest.raises(CommError) as error:
                reduce.all_reduce(torch.ones(3))
            caught.append(str(error.value))
            other.join()
        else:
            time.sleep(0.5)
            reduce.all_reduce(torch.ones(3))
        return "".join(caught)


@pytest.mark.peer_memory
def test_a_second_thread_gets_an_error_not_a_wrong_sum() -> None:
    assert run_ranks(2, two_threads)[0] == "two threads use one PeerAllReduce at once; open one for each"


def tables(mesh: Mesh, folder: str) -> list[int]:
    """Each rank reads another file; the first rank's counts."""
    file = Path(folder) / f"{mesh.rank}.json"
    write_algorithm(key_of("cpu", 2, True), Algorithm(two_stages_from=100 * (1 - mesh.rank)), file)
    with PeerAllReduce.open(mesh.world, mesh.watch, table=file) as reduce:
        return [reduce.num_stages(torch.ones(count)) for count in (24, 25)]


def test_all_ranks_choose_as_the_first_one_does(tmp_path: Path) -> None:
    assert run_ranks(2, tables, str(tmp_path)) == [[1, 2], [1, 2]]


def mixed(mesh: Mesh) -> int:
    """Odd calls of odd ranks have an input that no plan serves; chunks are the same all the same."""
    checked = 0
    algorithm = Algorithm(chunk_bytes=4096)
    with PeerAllReduce.open(mesh.world, mesh.watch, choice=algorithm) as reduce:
        for dtype in (torch.float32, torch.bfloat16):
            for length in (700, 1024, 5000, 8192):
                for turn in range(4):
                    parts = [
                        torch.arange(length).remainder(5 + rank + turn).to(dtype)
                        for rank in range(mesh.num_ranks)
                    ]
                    x, expected = parts[mesh.rank], sum_ranks_reference(parts)
                    if turn % 2 and mesh.rank % 2:
                        x = torch.stack([x, x], dim=1)[:, 0]
                    out = x if turn == 2 else None
                    assert torch.equal(reduce.all_reduce(x, out=out), expected)
                    checked += 1
        assert len(reduce._plans) == 8
    return checked


@pytest.mark.peer_memory
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_plans_and_other_calls_meet_in_every_chunk(num_ranks: int) -> None:
    assert run_ranks(num_ranks, mixed) == [32] * num_ranks


def test_stages_depend_on_whether_inputs_are_copied() -> None:
    mesh, x = Mesh.single(), torch.ones(256)
    for algorithm, eager, captured in (
        (Algorithm(), 1, 1),
        (Algorithm(two_stages_from=1024), 2, 2),
        (Algorithm(copied_two_stages_from=1024), 2, 1),
        (Algorithm(two_stages_from=512, copied_two_stages_from=2048), 1, 2),
        (Algorithm(two_stages_from=512, two_stages_until=1024), 1, 1),
        (Algorithm(two_stages_from=512, two_stages_until=1025), 2, 2),
    ):
        reduce = PeerAllReduce(mesh.world, mesh.watch, torch.device("cpu"), None, algorithm)
        assert reduce.num_stages(x) == eager
        reduce._capturing = True
        assert reduce.num_stages(x) == captured


def crowd(mesh: Mesh) -> float:
    with opened(mesh) as reduce:
        x = torch.ones(256)
        reduce.all_reduce(x)
        begun = time.monotonic()
        for _ in range(100):
            reduce.all_reduce(x)
        return time.monotonic() - begun


def test_more_ranks_than_cores_do_not_collapse() -> None:
    """100 calls of six ranks take some 30 ms on two idle cores; polling without end would take seconds."""
    assert max(run_ranks(6, crowd)) < 5.0


def until_killed(mesh: Mesh, victim: int, after_s: float) -> None:
    if mesh.rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with opened(mesh, area_bytes=8192) as reduce:
            for i in range(40):
                reduce.all_reduce(torch.ones(5000), stages=1 + i % 2, label="gradients, step 7")


def kill(times: int, seed: int) -> None:
    lots = random.Random(seed)
    for _ in range(times):
        victim, after_s = lots.randrange(3), lots.random() * 0.25
        begun = time.monotonic()
        outcomes = run_ranks_raw(3, until_killed, victim, after_s, collective_deadline_s=10)
        assert time.monotonic() - begun < 12
        for rank, (ok, text) in enumerate(outcomes):
            assert not ok
            last = text.strip().splitlines()[-1]
            if rank != victim:
                assert "CommError" in text, text
                assert re.search(rf"\brank {victim}\b", last), (victim, last)
        assert left_over() == []
    assert run_ranks(3, exact, (403,), 4096) == [8, 8, 8]


def test_a_killed_rank_is_named_and_leaves_nothing() -> None:
    kill(5, seed=1)


@pytest.mark.full
def test_fifty_killed_ranks() -> None:
    kill(50, seed=2)
