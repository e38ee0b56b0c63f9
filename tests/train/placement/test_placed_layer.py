"""Experts that move: nothing is lost, nothing is doubled, and what arrives is what was announced."""

from __future__ import annotations

import random

import pytest
import torch
from placed import build, numbers, owned

from moeclipse.balance.ownership import ExpertTransfer, Ownership
from moeclipse.balance.placement import Placement
from moeclipse.balance.replicate import plan_random
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.moe.own_loop import migrate
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.optim.adamw import STATES
from moeclipse.train.placement.placed_layer import PlacedLayer
from moeclipse.train.step.integrity import replica_differences

SHAPES = ((5, (2, 3, 0, 2)), (1, (1, 1, 1, 1)), (2, (1, 1, 0, 1)), (7, (7, 1, 2, 0)), (4, (4, 4, 4, 4)))
"""(experts, slots of each rank): ranks without experts, one expert everywhere, fewer experts than ranks."""


def check(placed: PlacedLayer) -> None:
    """Everything this rank holds or owns carries the numbers of the expert that the table names."""
    ownership, placement = placed.ownership, placed.placement
    me = placed.buckets[0].group.index
    assert placed.layer.experts.ids == placement.slots[me % placement.num_ranks]
    everyone = [owner.expert for index in range(ownership.group_size) for owner in ownership.owned_by(index)]
    assert sorted(everyone) == sorted(owner.expert for owner in ownership.owners)
    for bucket, state in zip(placed.buckets, placed.states, strict=True):
        for slot, expert in enumerate(placed.layer.experts.ids):
            if expert >= 0:
                assert torch.equal(bucket.rows[slot], numbers(bucket, expert, 0).to(bucket.rows.dtype))
        for number, kind in enumerate(STATES):
            for owner, part in owned(bucket, getattr(state, kind)):
                expected = numbers(bucket, owner.expert, number)[slice(*bucket.stretch(owner))]
                assert torch.equal(part, expected.to(part.dtype))


def wander(
    mesh: Mesh, num_experts: int, slots: tuple[int, ...], times: int, reduce: str, grain: int = 1
) -> int:
    """Random placement after random placement; returns the number of transfers."""
    placed = build(mesh, plan_random(num_experts, slots, 0), reduce, grain=grain)
    transfers = 0
    for number in range(1, times + 1):
        new = plan_random(num_experts, slots, number)
        if number % 2:
            rng = random.Random(number)  # any slots, any primaries, not only those that planners choose
            rows = tuple(tuple(rng.sample(row, len(row))) for row in new.slots)
            new = Placement(rows, tuple(rng.choice(ranks) for ranks in new.holders))
        ownership = Ownership.of(new, mesh.dp, reduce=reduce, layer=3, old=placed.ownership, grain=grain)
        transfers += placed.migrate(ownership, number)
        check(placed)
    if times < 100:
        assert replica_differences([placed]) == []
    return transfers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_re_placements_lose_nothing(shape: tuple[int, tuple[int, ...]]) -> None:
    found = run_ranks(4, wander, *shape, 25, "sum")
    assert len(set(found)) == 1
    assert found[0] > 0 or shape[0] * 4 == sum(shape[1])


@pytest.mark.parametrize("reduce", ["sum", "fedavg"])
def test_copies_move_alike(reduce: str) -> None:
    assert run_ranks(4, wander, 5, (4, 3), 25, reduce, 4, dp=2)[0] > 0


@pytest.mark.full
@pytest.mark.parametrize(("shape", "times"), zip(SHAPES, (600, 100, 600, 600, 300), strict=True), ids=str)
def test_two_thousand_re_placements(shape: tuple[int, tuple[int, ...]], times: int) -> None:
    """More than so many bring nothing where placements are few: each has followed on each by then."""
    run_ranks(4, wander, *shape, times, "sum", deadline_s=900.0)


def wrong_header(mesh: Mesh) -> str:
    """Rank 1 announces another expert than the table says; the receiver notices."""
    placed = build(mesh, Placement(((0, -1), (1, 2))))
    before = placed.buckets[0].rows.clone()
    if mesh.rank == 1:
        plain = migrate.header

        def lie(transfer: ExpertTransfer, layer: int, updates: int, length: int) -> list[int]:
            true = plain(transfer, layer, updates, length)
            return [*true[:2], 1, *true[3:]]

        migrate.header = lie
    new = Ownership.of(Placement(((0, 2), (1, -1))), old=placed.ownership)
    try:
        placed.migrate(new, 9)
    except CommError as error:
        assert torch.equal(placed.buckets[0].rows, before), "nothing may change before all is checked"
        return str(error)
    return ""


def test_a_wrong_transfer_is_named() -> None:
    told = run_ranks(2, wrong_header)[0]
    assert told.startswith(
        "rank 1 sent the weights of expert 1, layer 3, after 9 updates, 72 bytes, but rank 0 waits for the "
        "weights of expert 2"
    ), told
