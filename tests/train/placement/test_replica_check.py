"""Replicas are compared bit by bit, and a difference names layer, expert and ranks."""

from __future__ import annotations

import torch
from placed import build

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.step.integrity import check_replicas


def corrupted(mesh: Mesh) -> str:
    placed = build(mesh, Placement(((0, 1), (1, 2), (2, 1), (0,))))
    check_replicas([placed])
    if mesh.rank == 2:
        placed.buckets[1].rows.view(torch.int32)[1, 0] ^= 1
    try:
        check_replicas([placed])
    except CommError as error:
        return str(error)
    return ""


def test_one_bit_in_a_replica_is_named() -> None:
    for told in run_ranks(4, corrupted):
        assert told.startswith(
            "replicas differ: layer 3, expert 1: ranks [0, 1] and [2] hold other weights"
        ), told
