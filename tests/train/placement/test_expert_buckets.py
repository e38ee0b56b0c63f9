"""Buckets of experts with replicas: gradients go to owners, weights come back with their expert's number."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from placed import build, numbers

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.placement.expert_buckets import ExpertBucket


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


def exchanged(mesh: Mesh, table: list[list[int]], reduce: str) -> dict[str, Any]:
    """Every slot's gradient is (expert + 1) x 10^index; owners sum them, and send twice the sum back."""
    placement = Placement(tuple(map(tuple, table)))
    placed = build(mesh, placement, reduce, torch.float64)
    sums, weights, names, quiet = {}, [], [], []
    for bucket in placed.buckets:
        rows = bucket.grads.view(bucket.num_slots, bucket.size)
        for slot, expert in enumerate(bucket.slots):
            rows[slot] = (expert + 1) * 10.0**bucket.group.index
        bucket.launch()
        total = bucket.reduced().view(-1, bucket.size)
        assert bool((total == total[:, :1]).all())
        for owner, row in zip(bucket.owners_here, total, strict=True):
            sums[f"{bucket.key}/{owner.expert}/{owner.rank}"] = float(row[0])
        assert torch.equal(bucket.weights(), bucket.rows[bucket.own_slots].flatten())
        bucket.store((2 * total).flatten())
        bucket.publish().get()
        weights.append([float(row[0]) for row, expert in zip(bucket.rows, bucket.slots, strict=True)])
        names += [[segment.entry.name, segment.offset] for segment in bucket.segments()]
        names += [[f"all {segment.entry.name}", 0] for segment in bucket.segments(everything=True)]
        quiet.append(bucket.quiet)
    return {"sums": sums, "weights": weights, "names": names, "quiet": quiet}


TABLES = {
    "replicas": [[0, 1], [1, -1], [2, 1, 0]],
    "nobody has a second holder": [[0, -1], [1], [2]],
    "everybody holds everything": [[0, 1], [0, 1], [0, 1]],
}


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", TABLES)
def test_owners_sum_what_all_holders_send_and_all_get_the_result(name: str, dp: int) -> None:
    table, width = TABLES[name], 3
    results = run_ranks(width * dp, exchanged, table, "sum", dp=dp)
    expected = {
        expert: (expert + 1)
        * sum(
            10.0 ** (copy * width + rank)
            for copy in range(dp)
            for rank in range(width)
            if expert in table[rank]
        )
        for expert in {e for row in table for e in row} - {-1}
    }
    owned = defaultdict(list)
    for index, found in enumerate(results):
        for key, value in found["sums"].items():
            parameter, expert, _ = key.split("/")
            owned[parameter, int(expert)].append(value)
        for row in found["weights"]:
            held = {e: value for e, value in zip(table[index % width], row, strict=True) if e >= 0}
            assert held == {e: 2 * expected[e] for e in held}, "every replica has the owner's weights"
    assert all(values == [expected[e]] for (_, e), values in owned.items()), "one owner has the whole sum"
    assert {e for _, e in owned} == set(expected)
    assert all(found["quiet"] == [name.startswith("nobody") and dp == 1] * 2 for found in results)


def test_with_fedavg_every_replica_steps_and_the_primary_is_saved() -> None:
    results = run_ranks(3, exchanged, TABLES["replicas"], "fedavg")
    for index, found in enumerate(results):
        for key, value in found["sums"].items():
            _, expert, rank = map(str, key.split("/"))
            assert int(rank) == index
            assert value == (int(expert) + 1) * 10.0**index, "its own gradient alone"
    saved = [name for found in results for name, _ in found["names"] if not name.startswith("all ")]
    assert len(saved) == len(set(saved)) == 3 * 2, "each expert once"
    everything = [name for found in results for name, _ in found["names"] if name.startswith("all ")]
    assert len(everything) == 6 * 2, "each replica"


def digests(mesh: Mesh) -> list[int]:
    bucket: ExpertBucket = build(mesh, Placement(((1, -1, 0),))).buckets[0]
    before = bucket.digests().tolist()
    bucket.rows[1] = 7.0  # whatever lies in an empty slot does not count
    assert bucket.digests().tolist() == before
    bucket.rows[2] = numbers(bucket, 1, 0)
    assert bucket.digests()[2] == before[0], "the same weights have the same digest in any slot"
    bucket.rows[0].copy_(bucket.rows[0].roll(1))
    assert bucket.digests()[0] != before[0], "in another order they are not the same weights"
    return before


def test_a_digest_speaks_of_the_bits_of_a_slot() -> None:
    (found,) = run_ranks(1, digests)
    assert found[1] == 0
    assert found[0] != found[2]
