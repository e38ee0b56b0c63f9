"""Replicas must be equal, bit by bit: their digests are compared every so many steps
(`train/step/integrity`).

Each rank has one number for each slot of each layer; all of them travel in one exchange. A difference names
layer, expert and ranks: silent corruption of one rank's memory, or a bug, shows here and not as a loss that
drifts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.comm.async_ops.lane import gather_to_host
from moeclipse.core.errors import CommError
from moeclipse.train.placement.placed_layer import PlacedLayer


def check_replicas(layers: Sequence[PlacedLayer]) -> None:
    """Collective over the ranks of a stage; raises on all of them where replicas differ."""
    found = replica_differences(layers)
    if found:
        raise CommError(f"replicas differ: {'; '.join(found)}; resume from the last checkpoint")


def replica_differences(layers: Sequence[PlacedLayer]) -> list[str]:
    """Collective over the ranks of a stage; what differs, in the same words on all of them."""
    if not layers:
        return []
    group, mesh = layers[0].buckets[0].group, layers[0].buckets[0].mesh
    width = max(placed.placement.max_slots for placed in layers)
    mine = torch.zeros(len(layers), width, dtype=torch.int64, device=mesh.device)
    for number, placed in enumerate(layers):
        for turn, bucket in enumerate(placed.buckets):
            mine[number, : bucket.num_slots] += (2 * turn + 1) * bucket.digests()
    everyone = gather_to_host(mesh.grads, group, mine, "digests of replicas").get()
    found: list[str] = []
    for number, placed in enumerate(layers):
        placement = placed.placement
        for expert, holders in enumerate(placement.holders):
            ranks_of: dict[int, list[int]] = {}
            for copy in range(placed.ownership.copies):
                for rank in holders:
                    index = copy * placement.num_ranks + rank
                    digest = everyone[index][number][placement.slots[rank].index(expert)]
                    ranks_of.setdefault(digest, []).append(group.ranks[index])
            if len(ranks_of) > 1:
                sides = " and ".join(str(ranks) for ranks in sorted(ranks_of.values(), key=len, reverse=True))
                found.append(f"layer {placed.number}, expert {expert}: ranks {sides} hold other weights")
    return found
