"""The sum through torch.distributed, and what stands against peer memory."""

from __future__ import annotations

import time

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.plain import all_reduce_plain, obstacle_of
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks


def test_obstacles() -> None:
    assert obstacle_of(8, 8, "cuda") == ""
    assert obstacle_of(2, 8, "cpu") == ""
    assert obstacle_of(9, 8, "cpu") == "the group has 9 ranks, and peer memory serves 2 to 8"
    assert obstacle_of(2, 8, "mps") == "peer memory serves cpu and cuda, not mps"


def summed(mesh: Mesh) -> None:
    group, watch = mesh.world, mesh.watch
    x = torch.arange(6.0).view(2, 3) + mesh.rank
    expected = 2 * torch.arange(6.0).view(2, 3) + 1
    before = x.clone()
    assert torch.equal(all_reduce_plain(group, watch, x, None, "new"), expected)
    assert torch.equal(x, before)
    out = torch.empty(3, 2).t()
    assert all_reduce_plain(group, watch, x, out, "into strides") is out
    assert torch.equal(out, expected)
    assert all_reduce_plain(group, watch, x, x, "in place") is x
    assert torch.equal(x, expected)
    assert all_reduce_plain(group, watch, torch.empty(0), None, "nothing").numel() == 0


def test_sums_go_where_they_are_wanted() -> None:
    run_ranks(2, summed)


def test_one_rank_has_its_sum() -> None:
    mesh, x = Mesh.single(), torch.ones(3)
    found = all_reduce_plain(mesh.world, mesh.watch, x, None, "alone")
    assert found.eq(1).all()
    assert found is not x


def late(mesh: Mesh) -> str:
    if mesh.rank == 1:
        time.sleep(2.5)
        return ""
    with pytest.raises(CommError) as caught:
        all_reduce_plain(mesh.world, mesh.watch, torch.ones(3), None, "gradients of layer 3")
    return str(caught.value)


def test_a_missing_rank_is_named() -> None:
    text = run_ranks(2, late, collective_deadline_s=1.0)[0]
    assert "gradients of layer 3" in text
