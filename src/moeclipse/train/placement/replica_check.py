"""Replicas must be equal, bit by bit: their digests are compared every so many steps.

Each rank has one number for each slot of each layer; all of them travel in one exchange. A difference names
layer, expert and ranks: silent corruption of one rank's memory, or a bug, shows here and not as a loss that
drifts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.comm.flight.exchange import gather
from moeclipse.core.errors import CommError
from moeclipse.train.placement.moving import House


def check_replicas(houses: Sequence[House]) -> None:
    """Collective over the ranks of a stage; raises on all of them where replicas differ."""
    if not houses:
        return
    group, mesh = houses[0].buckets[0].group, houses[0].buckets[0].mesh
    width = max(house.homes.placement.max_slots for house in houses)
    mine = torch.zeros(len(houses), width, dtype=torch.int64, device=mesh.device)
    for number, house in enumerate(houses):
        for turn, bucket in enumerate(house.buckets):
            mine[number, : bucket.num_slots] += (2 * turn + 1) * bucket.digests()
    everyone = gather(mesh.grads, group, mine, "digests of replicas").to_host()
    found: list[str] = []
    for number, house in enumerate(houses):
        placement = house.homes.placement
        for expert, holders in enumerate(placement.holders):
            ranks_of: dict[int, list[int]] = {}
            for copy in range(house.homes.copies):
                for rank in holders:
                    place = copy * placement.num_ranks + rank
                    digest = everyone[place][number][placement.slots[rank].index(expert)]
                    ranks_of.setdefault(digest, []).append(group.ranks[place])
            if len(ranks_of) > 1:
                sides = " and ".join(str(ranks) for ranks in sorted(ranks_of.values(), key=len, reverse=True))
                found.append(f"layer {house.layer.layer}, expert {expert}: ranks {sides} hold other weights")
    if found:
        raise CommError(f"replicas differ: {'; '.join(found)}; resume from the last checkpoint")
