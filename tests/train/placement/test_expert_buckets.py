"""Buckets of experts with replicas: gradients go to owners, weights come back with their expert's number."""

from __future__ import annotations

from placed import build

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks


def published(mesh: Mesh) -> str:
    """Rank 1 thinks that its first slot holds another expert than the owner sends."""
    placed = build(mesh, Placement(((0, 1), (0, 1))))
    for bucket in placed.buckets:
        if mesh.rank == 1:
            bucket.slot_tags = bucket.slot_tags.flip(0)
    try:
        placed.buckets[0].publish().get()
    except CommError as error:
        return str(error)
    return ""


def test_published_weights_carry_their_experts_number() -> None:
    found = run_ranks(2, published)
    assert "weights of expert 0, layer 3, arrived where expert 1, layer 3, was expected" in found[1], found
