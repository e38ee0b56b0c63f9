"""All-reduce over shared memory: exact, the same bits everywhere, any length, and clear when it cannot be."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sums import DTYPES, SIZES, exact, integers, opened

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.all_reduce import PeerAllReduce
from moeclipse.comm.reduce.reducer import Planned
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
from moeclipse.testing.run_ranks import run_ranks


@pytest.mark.parametrize(("num_ranks", "area_bytes"), [(2, 4096), (3, 1 << 20), (4, 1 << 20), (8, 1 << 16)])
def test_integers_sum_exactly(num_ranks: int, area_bytes: int) -> None:
    sizes = SIZES if num_ranks < 8 else SIZES[3:-1]
    assert run_ranks(num_ranks, exact, sizes, area_bytes) == [8 * len(sizes)] * num_ranks


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_integers_sum_exactly_at_every_size(num_ranks: int) -> None:
    """Three ranks, whose parts are uneven, fill the area often; eight are slow on few cores, and fill a small
    one often above."""
    often = ((1 << 20) + 1, (1 << 22) - 1, 1 << 22) if num_ranks == 3 else ()
    sizes = (*range(1, 70), *SIZES, *often)
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
        spread = torch.zeros(12)
        assert reduce.all_reduce(torch.ones(6), out=spread[::2]).eq(2).all()
        assert spread[1::2].eq(0).all()
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


def begun(mesh: Mesh) -> int:
    """What was begun is completed by `get`, or by the next call of any kind."""
    with opened(mesh) as reduce:
        x, bounds = torch.arange(6.0).view(2, 3) + mesh.rank, [0, 2, 6]
        total, mine = 2 * torch.arange(6.0) + 1, slice(bounds[mesh.rank], bounds[mesh.rank + 1])
        first = reduce.begin_all_reduce(x.requires_grad_(), label="first")
        second = reduce.begin_reduce_scatter(x.detach().view(-1), bounds, label="second")
        assert first.ready, "the second call completed it"
        assert torch.equal(first.get(), total.view(2, 3))
        whole = torch.zeros(6)
        whole[mine] = second.get()
        assert torch.equal(whole[mine], total[mine])
        third = reduce.begin_all_gather(whole, bounds, label="third")
        assert torch.equal(reduce.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
        assert third.get() is whole
        assert torch.equal(whole, total)
        assert reduce.begin_all_reduce(torch.ones(0)).get().numel() == 0
        fourth = reduce.begin_all_reduce(torch.ones(3), label="fourth")
        reduce.check()  # nothing is launched on the CPU
        assert fourth.get().tolist() == [2.0] * 3
        assert reduce.share(x) is x
        assert not reduce.is_shared(x)
        assert reduce.unshare(x) is x
        return len(reduce._plans)


@pytest.mark.peer_memory
def test_what_was_begun_is_completed_by_whoever_comes_next() -> None:
    assert run_ranks(2, begun) == [0, 0], "sharing forgets plans"


class Device:
    """Reductions that are only launched, as on a device."""

    dtypes, asynchronous, arrived = (torch.float32,), True, True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.late = False

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor, two_stages: bool, _chunk: int, label: str
    ) -> Iterator[None]:
        self.events.append(f"{label} in {1 + two_stages}")
        out.copy_(2 * x)
        return iter(())

    def plan(self, _key: Any, x: torch.Tensor, *_: Any) -> Planned | None:
        def again(y: torch.Tensor, out: torch.Tensor | None, label: str) -> torch.Tensor | None:
            if y.data_ptr() != x.data_ptr():
                return None
            self.events.append(f"{label} again")
            return 2 * y if out is None else out.copy_(2 * y)

        return again

    def is_shared(self, _x: torch.Tensor) -> bool:
        return "share" in self.events

    def can_part(self, *_: Any) -> bool:
        return False

    def share(self, _x: torch.Tensor) -> None:
        self.events.append("share")

    def unshare(self, _x: torch.Tensor) -> None:
        raise ConfigError("it is not shared")

    @contextmanager
    def capture(self, dtypes: Sequence[torch.dtype]) -> Iterator[None]:
        self.events.append(f"capture {len(dtypes)}")
        yield
        self.events.append("captured")

    def settle(self) -> None:
        self.events.append("settle")
        if self.late:
            raise CommError("rank 1 did not arrive")

    def close(self) -> None:
        self.events.append("close")


def on_device() -> tuple[PeerAllReduce, Device]:
    mesh, device = Mesh.single(), Device()
    reducer: Any = device
    algorithm = Algorithm(two_stages_from=64, copied_two_stages_from=32, max_bytes=128)
    return PeerAllReduce(mesh.world, mesh.watch, torch.device("cpu"), reducer, algorithm), device


def test_calls_on_a_device() -> None:
    reduce, device = on_device()
    x = torch.ones(8)
    assert reduce.all_reduce(x, label="sum").eq(2).all()
    assert reduce.all_reduce(x, label="sum").eq(2).all()
    assert reduce.all_reduce(x.clone(), label="other").eq(2).all()
    assert device.events == ["sum in 2", "sum again", "other in 2"], "copied inputs take two stages early"
    assert reduce.should_use(x).why == "ranks share memory"
    reduce.all_reduce(x, label="planned")
    reduce.all_reduce(x, label="planned")
    assert device.events[-1] == "planned again"
    reduce.share(x)
    assert reduce.should_use(x).why == "peers read it where it lies"
    reduce.all_reduce(x, label="there")
    assert device.events[-2:] == ["share", "there in 1"], "and the plan was forgotten"
    assert reduce.reduce_scatter(x, [0, 8]).eq(2).all()
    with pytest.raises(ConfigError, match="on a device every call is asynchronous"):
        reduce.begin_all_reduce(x)


def test_a_capture_on_a_device() -> None:
    reduce, device = on_device()
    with reduce.capture():
        assert reduce.num_stages(torch.ones(8)) == 1, "inputs of graphs are not copied"
        with pytest.raises(ConfigError, match="large cannot be captured: 132 bytes are more than 128"):
            reduce.all_reduce(torch.ones(33), label="large")
    assert reduce.num_stages(torch.ones(8)) == 2
    with reduce.capture(torch.float32, torch.float16):
        pass
    assert device.events == ["capture 1", "captured", "capture 2", "captured"]


def test_what_went_wrong_on_a_device_is_told_by_check() -> None:
    reduce, device = on_device()
    reduce.check()
    with pytest.raises(ConfigError, match="it is not shared"):
        reduce.unshare(torch.ones(8))
    reduce.check()  # that was a mistake, and harms nothing
    device.late = True
    with pytest.raises(CommError, match="rank 1 did not arrive"):
        reduce.check()
    with pytest.raises(CommError, match="cannot be used any more: rank 1 did not arrive; open a new one"):
        reduce.all_reduce(torch.ones(8))
    reduce.close()
    assert device.events == ["settle", "settle", "settle", "close"]
