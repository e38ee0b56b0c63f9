"""Experts that move: nothing is lost, nothing is doubled, and what arrives is what was announced."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from moeclipse.balance.homes import Homes, Parcel
from moeclipse.balance.placement import Placement
from moeclipse.balance.replicate import plan_random
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.moe import migrate
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.buckets import Buckets
from moeclipse.train.config import OptimConfig
from moeclipse.train.optim import STATES, AdamW
from moeclipse.train.placement.expert_buckets import ExpertBucket
from moeclipse.train.placement.moving import House
from moeclipse.train.placement.replica_check import check_replicas

SHAPES = ((5, (2, 3, 0, 2)), (1, (1, 1, 1, 1)), (2, (1, 1, 0, 1)), (7, (7, 1, 2, 0)), (4, (4, 4, 4, 4)))
"""(experts, slots of each rank): ranks without experts, one expert everywhere, fewer experts than ranks."""


def build(mesh: Mesh, placement: Placement, reduce: Any = "sum", dtype: torch.dtype = torch.float32) -> House:
    """One layer and its optimizer; every expert's weights and state are numbers that name it."""
    gate = GateConfig(top_k=1)
    moe = MoE(2, 3, placement.num_experts, gate=gate, mesh=mesh, placement=placement, layer=3, dtype=dtype)
    homes = Homes.of(placement, mesh.dp, reduce=reduce, layer=3)

    def place(parameter: Any, name: str, layer: MoE, key: str) -> ExpertBucket:
        return ExpertBucket(parameter, name, layer, key, homes, mesh)

    optim = AdamW(Buckets(moe, mesh, 1.0, "off", place), OptimConfig())
    pairs = [(b, s) for b, s in zip(optim.buckets, optim.states, strict=True) if isinstance(b, ExpertBucket)]
    house = House([bucket for bucket, _ in pairs], [state for _, state in pairs])
    for bucket, state in pairs:
        for slot, expert in enumerate(placement.slots[mesh.ep_index]):
            bucket.rows[slot] = numbers(bucket, expert, 0)
        for number, kind in enumerate(STATES):
            for at, home in enumerate(bucket.here):
                getattr(state, kind).view(-1, bucket.size)[at] = numbers(bucket, home.expert, number)
    return house


def numbers(bucket: ExpertBucket, expert: int, kind: int) -> torch.Tensor:
    salt = sum(map(ord, bucket.key))
    return torch.arange(bucket.size) + 64.0 * (expert + 8 * kind) + salt % 7


def check(house: House) -> None:
    """Everything this rank holds or owns carries the numbers of the expert that the table names."""
    homes = house.homes
    me = house.buckets[0].group.index
    assert house.layer.experts.ids == homes.placement.slots[me % homes.placement.num_ranks]
    assert sorted(home.expert for place in range(homes.num_places) for home in homes.owned(place)) == sorted(
        home.expert for home in homes.homes
    )
    for bucket, state in zip(house.buckets, house.states, strict=True):
        for slot, expert in enumerate(house.layer.experts.ids):
            if expert >= 0:
                assert torch.equal(bucket.rows[slot], numbers(bucket, expert, 0).to(bucket.rows.dtype))
        for number, kind in enumerate(STATES):
            rows = getattr(state, kind).view(-1, bucket.size)
            assert len(rows) == len(bucket.here)
            for at, home in enumerate(bucket.here):
                assert torch.equal(rows[at], numbers(bucket, home.expert, number).to(rows.dtype))


def wander(mesh: Mesh, num_experts: int, slots: tuple[int, ...], times: int, reduce: str) -> int:
    """Random placement after random placement; returns how many parcels travelled."""
    house = build(mesh, plan_random(num_experts, slots, 0), reduce)
    travelled = 0
    for number in range(1, times + 1):
        new = plan_random(num_experts, slots, number)
        if number % 2:
            rng = random.Random(number)  # any slots, any primaries, not only those that planners choose
            rows = tuple(tuple(rng.sample(row, len(row))) for row in new.slots)
            new = Placement(rows, tuple(rng.choice(ranks) for ranks in new.holders))
        homes = Homes.of(new, mesh.dp, reduce=reduce, layer=3, old=house.homes)
        travelled += house.relocate(homes, number)
        check(house)
    if times < 100:
        check_replicas([house])
    return travelled


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_re_placements_lose_nothing(shape: tuple[int, tuple[int, ...]]) -> None:
    found = run_ranks(4, wander, *shape, 25, "sum")
    assert len(set(found)) == 1
    assert found[0] > 0 or shape[0] * 4 == sum(shape[1])


@pytest.mark.parametrize("reduce", ["sum", "fedavg"])
def test_copies_move_alike(reduce: str) -> None:
    assert run_ranks(4, wander, 5, (4, 3), 25, reduce, dp=2)[0] > 0


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ten_thousand_re_placements(shape: tuple[int, tuple[int, ...]]) -> None:
    run_ranks(4, wander, *shape, 2000, "sum", deadline_s=900.0)


def wrong_canary(mesh: Mesh) -> str:
    """Rank 1 packs another expert than the table says; whoever opens the parcel notices."""
    house = build(mesh, Placement(((0, -1), (1, 2))))
    before = house.buckets[0].rows.clone()
    if mesh.rank == 1:
        plain = migrate.header

        def lie(parcel: Parcel, layer: int, updates: int, length: int) -> list[int]:
            return [*plain(parcel, layer, updates, length)[:2], 1, *plain(parcel, layer, updates, length)[3:]]

        migrate.header = lie
    new = Homes.of(Placement(((0, 2), (1, -1))), old=house.homes)
    try:
        house.relocate(new, 9)
    except CommError as error:
        assert torch.equal(house.buckets[0].rows, before), "nothing may change before all is checked"
        return str(error)
    return ""


def test_a_wrong_parcel_is_named() -> None:
    told = run_ranks(2, wrong_canary)[0]
    assert told.startswith(
        "rank 1 sent the weights of expert 1, layer 3, after 9 updates, 72 bytes, but rank 0 waits for the "
        "weights of expert 2"
    ), told


def corrupted(mesh: Mesh) -> str:
    house = build(mesh, Placement(((0, 1), (1, 2), (2, 1), (0,))))
    check_replicas([house])
    if mesh.rank == 2:
        house.buckets[1].rows.view(torch.int32)[1, 0] ^= 1
    try:
        check_replicas([house])
    except CommError as error:
        return str(error)
    return ""


def test_one_bit_in_a_replica_is_named() -> None:
    for told in run_ranks(4, corrupted):
        assert told.startswith(
            "replicas differ: layer 3, expert 1: ranks [0, 1] and [2] hold other weights"
        ), told


def published(mesh: Mesh) -> str:
    """Rank 1 thinks that its first slot holds another expert than the owner sends."""
    house = build(mesh, Placement(((0, 1), (0, 1))))
    for bucket in house.buckets:
        if mesh.rank == 1:
            bucket.slot_tags = bucket.slot_tags.flip(0)
    try:
        house.buckets[0].publish().get()
    except CommError as error:
        return str(error)
    return ""


def test_published_weights_carry_their_experts_number() -> None:
    found = run_ranks(2, published)
    assert "weights of expert 0, layer 3, arrived where expert 1, layer 3, was expected" in found[1], found
