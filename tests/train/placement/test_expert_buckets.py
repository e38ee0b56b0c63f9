"""Buckets of experts with replicas: gradients go to owners, weights come back with their expert's number."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from placed import build, numbers, owned

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
    assert (
        "weights of expert 0, layer 3, part 0, arrived where expert 1, layer 3, part 0, was expected"
        in found[1]
    ), found


def exchanged(mesh: Mesh, table: list[list[int]], reduce: str, grain: int) -> dict[str, Any]:
    """Element i of a slot's gradient is (i + 1) (expert + 1) 10^index; owners send twice their sums back."""
    placement = Placement(tuple(map(tuple, table)))
    placed = build(mesh, placement, reduce, torch.float64, grain)
    sums: dict[str, list[tuple[int, list[float]]]] = {}
    weights, names, quiet = [], [], []
    for bucket in placed.buckets:
        rows = bucket.grads.view(bucket.num_slots, bucket.size)
        for slot, expert in enumerate(bucket.slots):
            rows[slot] = torch.arange(1, bucket.size + 1) * (expert + 1) * 10.0**bucket.group.index
        bucket.launch()
        total = bucket.reduced().clone()
        for owner, part in owned(bucket, total):
            where = f"{bucket.key}/{owner.expert}"
            sums.setdefault(where, []).append((bucket.stretch(owner)[0], part.tolist()))
        held = [
            bucket.rows[bucket.slots.index(o.expert)][slice(*bucket.stretch(o))] for o in bucket.owners_here
        ]
        assert torch.equal(bucket.weights(), torch.cat([*held, total[:0]]))
        bucket.store(2 * total)
        bucket.publish().get()
        weights.append(bucket.rows.tolist())
        names += [[s.entry.name, s.start, s.length, s.offset] for s in bucket.segments()]
        names += [[f"all {s.entry.name}", s.start, s.length, 0] for s in bucket.segments(everything=True)]
        quiet.append(bucket.quiet)
    return {"sums": sums, "weights": weights, "names": names, "quiet": quiet}


SIZES = {"up": 12, "down": 6}
TABLES = {
    "replicas": [[0, 1], [1, -1], [2, 1, 0]],
    "nobody has a second holder": [[0, -1], [1], [2]],
    "nobody, and slots are empty in front and between": [[-1, 0], [1, -1, 3], [2]],
    "everybody holds everything": [[0, 1], [0, 1], [0, 1]],
}


@pytest.mark.parametrize(("dp", "grain"), [(1, 1), (2, 4)])
@pytest.mark.parametrize("name", TABLES)
def test_owners_sum_what_all_holders_send_and_all_get_the_result(name: str, dp: int, grain: int) -> None:
    """Each replica has the sum of its part, all parts of an expert are its sum, and all hold the result."""
    table, width = TABLES[name], 3
    results = run_ranks(width * dp, exchanged, table, "sum", grain, dp=dp)
    expected = {
        expert: [
            element
            * (expert + 1)
            * sum(
                10.0 ** (c * width + rank)
                for c in range(dp)
                for rank in range(width)
                if expert in table[rank]
            )
            for element in range(1, 13)
        ]
        for expert in {e for row in table for e in row} - {-1}
    }
    parts = defaultdict(list)
    for index, found in enumerate(results):
        for key, mine in found["sums"].items():
            parts[tuple(key.split("/"))] += mine
        for rows in found["weights"]:
            for expert, row in zip(table[index % width], rows, strict=True):
                twice = [2 * value for value in expected.get(expert, [])]
                assert expert < 0 or row == twice[: len(row)], "all hold the owners' weights"
    assert len(parts) == 2 * len(expected)
    for (key, expert), mine in parts.items():
        whole = [value for _, part in sorted(mine) for value in part]
        assert whole == expected[int(expert)][: SIZES[key]], "the parts are the whole sum, each element once"
        assert len(mine) == sum(int(expert) in row for row in table), "one part for each replica"
    saved = [name for found in results for name in found["names"] if not name[0].startswith("all ")]
    assert sum(length for _, _, length, _ in saved) == 18 * len(expected), (
        "a checkpoint has each element once"
    )
    assert all(found["quiet"] == [name.startswith("nobody") and dp == 1] * 2 for found in results)


def test_with_fedavg_every_replica_steps_and_the_primary_is_saved() -> None:
    results = run_ranks(3, exchanged, TABLES["replicas"], "fedavg", 1)
    for index, found in enumerate(results):
        for key, mine in found["sums"].items():
            expert = int(key.split("/")[1])
            size = SIZES[key.split("/")[0]]
            own = [element * (expert + 1) * 10.0**index for element in range(1, size + 1)]
            assert mine == [(0, own)], "its own gradient alone, of all elements"
    saved = [name[0] for found in results for name in found["names"] if not name[0].startswith("all ")]
    assert len(saved) == len(set(saved)) == 3 * 2, "each expert once"
    everything = [name for found in results for name in found["names"] if name[0].startswith("all ")]
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
