"""Replicas are compared bit by bit, and a difference names layer, expert and ranks."""

from __future__ import annotations

import torch
from placed import build

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.step.integrity import replica_differences


def corrupted(mesh: Mesh) -> str:
    placed = build(mesh, Placement(((0, 1), (1, 2), (2, 1), (0,))))
    assert replica_differences([placed]) == []
    if mesh.rank == 2:
        placed.buckets[1].rows.view(torch.int32)[1, 0] ^= 1
    return "; ".join(replica_differences([placed]))


def test_one_bit_in_a_replica_is_named() -> None:
    for told in run_ranks(4, corrupted):
        assert told.startswith("layer 3, expert 1: ranks [0, 1] and [2] hold other weights"), told
