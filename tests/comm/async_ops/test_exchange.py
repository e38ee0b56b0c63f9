"""Collectives: uneven, empty, in rank order, and skipped where there is only one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeclipse.comm.async_ops.exchange import (
    all_gather_shards,
    all_reduce,
    reduce_scatter,
    sum_of_parts,
    total,
)
from moeclipse.comm.async_ops.lane import all_to_all, gather, gather_to_host
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def uneven(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    """Rank r sends p rows of value 10 r + p to each peer p: nothing at all to rank 0."""
    send = list(range(mesh.num_ranks))
    rows = torch.cat([torch.full((p, 2), 10 * mesh.rank + p) for p in send]).to(dtype)
    return all_to_all(mesh.a2a, mesh.experts, rows, send, [mesh.rank] * mesh.num_ranks, "test").get()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_arrive_where_they_belong(dtype: torch.dtype) -> None:
    for rank, rows in enumerate(run_ranks(3, uneven, dtype)):
        expected = [10 * source + rank for source in range(3) for _ in range(rank)]
        assert rows[:, 0].tolist() == expected
        assert rows.dtype == dtype


def sums(mesh: Mesh) -> tuple:
    flat = torch.arange(10, dtype=torch.float64) * (mesh.rank + 1)
    bounds = [0, 3, 3, 10]  # rank 1 owns nothing
    shard = reduce_scatter(mesh.grads, mesh.world, flat, bounds, "test").get()
    mine = torch.zeros(10, dtype=torch.float64)
    mine[bounds[mesh.rank] : bounds[mesh.rank + 1]] = shard
    whole = all_gather_shards(mesh.grads, mesh.world, mine, bounds, "test").get()
    added = total(mesh.grads, mesh.world, torch.tensor([[1.0, mesh.rank]]), "test").get()
    return whole, gather(mesh.a2a, mesh.world, torch.tensor([mesh.rank]), "test").get(), added


def test_uneven_shards_sum_and_gather() -> None:
    for whole, everyone, added in run_ranks(3, sums):
        assert torch.equal(whole, torch.arange(10, dtype=torch.float64) * 6)
        assert everyone.tolist() == [[0], [1], [2]]
        assert added.tolist() == [[3.0, 3.0]]


def test_a_sum_leaves_its_parts_as_they_came() -> None:
    """Loads are summed for the loss and read rank by rank for the split, in either order."""
    parts = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    for _ in range(2):
        assert sum_of_parts(parts).tolist() == [11.0, 22.0]
    assert parts.tolist() == [[1.0, 2.0], [10.0, 20.0]]


def numbers(mesh: Mesh) -> list:
    return gather_to_host(mesh.a2a, mesh.world, torch.tensor([[mesh.rank, 7]]), "test").get()


def test_numbers_are_gathered_to_the_host() -> None:
    assert run_ranks(2, numbers) == [[[[0, 7]], [[1, 7]]]] * 2
    assert numbers(Mesh.single()) == [[[0, 7]]]


def test_one_rank_sends_nothing() -> None:
    mesh = Mesh.single()
    x = torch.randn(4, 2)
    assert all_to_all(mesh.a2a, mesh.experts, x, [4], [4], "test").get() is x
    assert gather(mesh.a2a, mesh.world, x, "test").get().shape == (1, 4, 2)
    assert torch.equal(total(mesh.a2a, mesh.world, x, "test").get(), x)
    assert all_reduce(mesh.a2a, mesh.world, x, "test").get() is x
    assert all_gather_shards(mesh.a2a, mesh.world, x, [0, 8], "test").get() is x
    out = torch.empty_like(x)
    assert all_to_all(mesh.a2a, mesh.experts, x, [4], [4], "test", out).get() is out
    assert torch.equal(out, x)
    assert reduce_scatter(mesh.a2a, mesh.world, x[0], [0, 2], "test").get().data_ptr() == x.data_ptr()


def ordered(mesh: Mesh) -> torch.Tensor:
    """1e16 + 1 - 1e16 depends on the order; all ranks must take the same one."""
    value = torch.tensor([[1.0], [1e16], [-1e16]])[mesh.rank].double()
    return total(mesh.grads, mesh.world, value, "test").get()


def test_every_rank_adds_in_rank_order() -> None:
    assert [float(value) for value in run_ranks(3, ordered)] == [(1.0 + 1e16) - 1e16] * 3


def native(mesh: Mesh) -> None:
    """What NCCL is asked for, over gloo, which has these collectives too: the same results as ours."""
    theirs, rank = replace(mesh.world, backend="nccl"), mesh.rank
    flat, even, uneven = torch.arange(6.0) * (1 + rank), [0, 3, 6], [0, 1, 6]
    for group in (mesh.world, theirs):
        assert all_reduce(mesh.grads, group, flat.clone(), "sum").get().tolist() == [0, 3, 6, 9, 12, 15]
        for bounds in (even, uneven):
            mine = slice(bounds[rank], bounds[rank + 1])
            shard = reduce_scatter(mesh.grads, group, flat.clone(), bounds, "scatter").get()
            assert torch.equal(shard, (3 * torch.arange(6.0))[mine])
            whole = torch.full((6,), -1.0)
            whole[mine] = shard
            assert all_gather_shards(mesh.grads, group, whole, bounds, "gather").get() is whole
            assert torch.equal(whole, 3 * torch.arange(6.0))


def test_native_collectives_give_the_same() -> None:
    run_ranks(2, native)
