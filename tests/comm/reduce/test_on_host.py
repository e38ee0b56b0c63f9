"""Reductions between processes of one host: their sums, where they stop, and their plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.on_host import CpuReducer, OneStagePlan
from moeclipse.comm.reduce.reducer import run_out
from moeclipse.comm.shared.host import FOLDER, NoPeerMemoryError
from moeclipse.core.errors import ConfigError
from moeclipse.ops.peer_reduce import add_residual, rms_norm, sum_ranks_reference
from moeclipse.testing.run_ranks import run_ranks

pytestmark = pytest.mark.peer_memory

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
AREA = 4096


def opened(mesh: Mesh) -> CpuReducer:
    return CpuReducer.open(mesh.world, mesh.watch, AREA, None, FOLDER)


def inputs(mesh: Mesh, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(length)
    return list(torch.randint(-8, 9, (mesh.num_ranks, length), generator=source).to(dtype))


def sums(mesh: Mesh) -> int:
    """Shorter and longer than an area, in and out of place; the bits of one stage are those of two."""
    reducer, checked = opened(mesh), 0
    for dtype in DTYPES:
        for length in (1, 7, 1000, 5000):
            xs = inputs(mesh, length, dtype)
            expected = sum_ranks_reference(xs)
            for two in (False, True):
                x, out = xs[mesh.rank].clone(), torch.empty(length, dtype=dtype)
                run_out(reducer.all_reduce(x, out, two, AREA, "sum"))
                assert torch.equal(out, expected)
                run_out(reducer.all_reduce(x, x, two, 512, "sum, in place"))
                assert torch.equal(x, expected)
                checked += 1
    reducer.close()
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_are_those_of_the_definition(num_ranks: int) -> None:
    assert run_ranks(num_ranks, sums) == [32] * num_ranks


def parts(mesh: Mesh) -> None:
    reducer = opened(mesh)
    for bounds in ([0, 700, 700, 5000], [0, 0, 0, 3], [0, 2500, 2600, 2600]):
        xs = inputs(mesh, bounds[-1], torch.float32)
        expected = sum_ranks_reference(xs)
        mine = slice(bounds[mesh.rank], bounds[mesh.rank + 1])
        assert reducer.can_part(bounds, torch.float32)
        part = torch.empty(mine.stop - mine.start)
        run_out(reducer.reduce_scatter(xs[mesh.rank], bounds, part, "scatter"))
        assert torch.equal(part, expected[mine])
        whole = torch.empty(bounds[-1])
        run_out(reducer.all_gather(part, bounds, whole, "gather"))
        assert torch.equal(whole, expected)
    reducer.close()


def test_parts_may_be_of_any_length() -> None:
    run_ranks(3, parts)


def norms(mesh: Mesh) -> None:
    reducer = opened(mesh)
    for T, D in ((1, 8), (37, 100), (0, 4)):  # 37 rows of 100 go in four turns
        xs = [x.view(T, D) for x in inputs(mesh, T * D, torch.float32)]
        residual, weight = torch.ones(T, D), torch.linspace(1, 2, D)
        for two in (False, True):
            normed, h = reducer.all_reduce_rms_norm(xs[mesh.rank], residual, weight, 1e-6, two, "norm")
            assert torch.equal(h, add_residual(xs, residual))
            assert torch.equal(normed, rms_norm(h, weight, 1e-6))
    reducer.close()


def test_rows_are_summed_and_normed() -> None:
    run_ranks(3, norms)


def left_open(mesh: Mesh) -> list[bool]:
    """A reduction stops once, when its input is where peers can read it."""
    reducer, x, out = opened(mesh), torch.full((2000,), float(mesh.rank + 1)), torch.zeros(2000)
    steps: Iterator[None] = reducer.all_reduce(x, out, True, AREA, "left open")
    assert out.eq(0).all(), "nothing happens before the first step"
    next(steps)
    mesh.barrier()
    found = [reducer.arrived, bool(out.eq(0).all())]
    assert list(steps) == [], "the chunks and stages that follow are one step"
    assert out.eq(3).all()
    reducer.close()
    return found


def test_a_reduction_may_be_left_open_where_it_would_wait() -> None:
    assert run_ranks(2, left_open) == [[True, True]] * 2


def planned(mesh: Mesh) -> int:
    """Of one stage; rank 0 repeats with a plan what the others do without: they meet in every chunk."""
    reducer, checked = opened(mesh), 0

    def alone(plan: object) -> object:
        return plan

    for dtype in DTYPES:
        for length in (5, 1000, 5000):
            xs = inputs(mesh, length, dtype)
            x, out = xs[mesh.rank].view(-1, 1), torch.empty(length, 1, dtype=dtype)
            key = (dtype, length, None)
            plan = reducer.plan(key, x.view(-1), out, False, AREA, alone)  # type: ignore[arg-type]
            assert isinstance(plan, OneStagePlan)
            assert reducer.plan(key, x.view(-1), out, False, AREA, alone) is plan  # type: ignore[arg-type]
            assert reducer.plan(key, x.view(-1), out, True, AREA, alone) is None  # type: ignore[arg-type]
            if mesh.rank == 0:
                plan(x, out, "planned")
            else:
                run_out(reducer.all_reduce(x.view(-1), out.view(-1), False, AREA, "not planned"))
            assert torch.equal(out.view(-1), sum_ranks_reference(xs))
            checked += 1
    reducer.close()
    return checked


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_plans_meet_calls_without_one(num_ranks: int) -> None:
    assert run_ranks(num_ranks, planned) == [12] * num_ranks


def on_the_cpu(mesh: Mesh) -> None:
    reducer, x = opened(mesh), torch.ones(3)
    reducer.share(x)
    assert not reducer.is_shared(x), "memory of its own cannot be shown later"
    reducer.unshare(x)
    reducer.settle()
    with pytest.raises(ConfigError, match=r"for CUDA graphs .*: this all-reduce is on the cpu"):
        reducer.capture([torch.float32])
    reducer.close()
    reducer.close()


def test_what_devices_have_is_nothing_here() -> None:
    run_ranks(2, on_the_cpu)


def nowhere(mesh: Mesh, folder: str) -> str:
    with pytest.raises(NoPeerMemoryError) as caught:
        CpuReducer.open(mesh.world, mesh.watch, AREA, None, Path(folder) / "absent")
    return str(caught.value)


def test_ranks_that_share_nothing_are_all_told(tmp_path: Path) -> None:
    first, second = run_ranks(2, nowhere, str(tmp_path))
    assert first == second
    assert "absent cannot be used" in first
