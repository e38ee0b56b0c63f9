"""fedavg: replicas step for themselves, and their weights are averaged, each by the rows it has seen.

    w_e = sum over replicas r of n_r w_r / sum of n_r           (n_r = 0 for all: the plain mean)

This is local SGD on experts, another model than the one trained with the sum of gradients: a replica steps
with its part of the gradient, and Adam divides by the size of that part. `docs/placement.md` shows how far
that leads. The moments stay with their replicas; between averages replicas differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.comm.async_ops.lane import all_to_all, gather_to_host
from moeclipse.train.placement.placed_layer import PlacedLayer


@torch.no_grad()
def average_replicas(layers: Sequence[PlacedLayer]) -> None:
    """Collective over the ranks of a stage."""
    published = []
    for placed, rows in zip(layers, rows_of_replicas(layers), strict=True):
        for bucket, state in placed.trained:
            ownership, me = bucket.ownership, bucket.group.index
            mine = {owner.expert: which for which, owner in enumerate(bucket.owners_here)}
            by_peer: list[list[int]] = [[] for _ in range(ownership.group_size)]
            for owner in ownership.owners:
                if owner.expert in mine and ownership.index_of(owner) != me:
                    by_peer[ownership.index_of(owner)].append(owner.expert)
            weight = state.values("weight").view(-1, bucket.size)
            leaving = weight[[mine[expert] for experts in by_peer for expert in experts]]
            counts = list(map(len, by_peer))
            label = f"average of replicas, bucket {bucket.name}"
            arrived = all_to_all(bucket.mesh.grads, bucket.group, leaving, counts, counts, label).get()
            senders = [(peer, expert) for peer, experts in enumerate(by_peer) for expert in experts]
            theirs = dict(zip(senders, arrived, strict=True))
            averaged = weight.clone()
            for expert, which in mine.items():
                owners = [owner for owner in ownership.owners if owner.expert == expert]
                seen = [rows[expert, owner.rank] for owner in owners]
                if len(owners) == 1:
                    continue
                shares = [n / sum(seen) if sum(seen) else 1 / len(owners) for n in seen]
                total = torch.zeros_like(averaged[which])
                for owner, share in zip(owners, shares, strict=True):
                    peer = ownership.index_of(owner)
                    total += share * (weight[which] if peer == me else theirs[peer, expert])
                averaged[which] = total
            state.put("weight", averaged.flatten())
            bucket.store(averaged.flatten())
            published.append(bucket.publish())
    for result in published:
        result.get()


def rows_of_replicas(layers: Sequence[PlacedLayer]) -> list[dict[tuple[int, int], int]]:
    """(expert, rank) -> rows since the last average, over all copies; counting begins anew."""
    group, mesh = layers[0].buckets[0].group, layers[0].buckets[0].mesh
    width = max(placed.placement.max_slots for placed in layers)
    mine = torch.zeros(len(layers), width, dtype=torch.int64)
    for number, placed in enumerate(layers):
        for slot, count in enumerate(placed.layer.schedule.take_computed()):
            mine[number, slot] = count
    everyone = gather_to_host(mesh.grads, group, mine.to(mesh.device), "rows of replicas").get()
    found = []
    for number, placed in enumerate(layers):
        placement = placed.placement
        rows: dict[tuple[int, int], int] = {}
        for index, table in enumerate(everyone):
            rank = index % placement.num_ranks
            for slot, expert in enumerate(placement.slots[rank]):
                rows[expert, rank] = rows.get((expert, rank), 0) + table[number][slot]
        found.append(rows)
    return found
