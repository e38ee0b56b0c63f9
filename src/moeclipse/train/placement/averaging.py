"""fedavg: replicas step for themselves, and their weights are averaged, each by the rows it has seen.

    w_e = sum over replicas r of n_r w_r / sum of n_r           (n_r = 0 for all: the plain mean)

This is local SGD on experts, another model than the one trained with the sum of gradients: a replica steps
with its part of the gradient, and Adam divides by the size of that part. `docs/placement.md` shows how far
that leads. The moments stay with their replicas; between averages replicas differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.comm.flight.exchange import all_to_all, gather
from moeclipse.train.placement.moving import House


@torch.no_grad()
def average_replicas(houses: Sequence[House]) -> None:
    """Collective over the ranks of a stage."""
    on_the_way = []
    for house, rows in zip(houses, rows_of_replicas(houses), strict=True):
        for bucket, state in zip(house.buckets, house.states, strict=True):
            homes, me = bucket.homes, bucket.group.index
            mine = {home.expert: place for place, home in enumerate(bucket.here)}
            others = [h for h in homes.homes if h.expert in mine and homes.owner(h) != me]
            by_place: list[list[int]] = [[] for _ in range(homes.num_places)]
            for home in others:
                by_place[homes.owner(home)].append(home.expert)
            weight = state.weight.view(-1, bucket.size)
            leaving = weight[[mine[expert] for experts in by_place for expert in experts]]
            counts = list(map(len, by_place))
            label = f"average of replicas, bucket {bucket.name}"
            arrived = all_to_all(bucket.mesh.grads, bucket.group, leaving, counts, counts, label).get()
            parts = {(p, e): None for p, experts in enumerate(by_place) for e in experts}
            by_key = dict(zip(parts, arrived, strict=True))
            averaged = weight.clone()
            for expert, place in mine.items():
                family = [home for home in homes.homes if home.expert == expert]
                seen = [rows[home.expert, home.rank] for home in family]
                if len(family) == 1:
                    continue
                shares = [n / sum(seen) if sum(seen) else 1 / len(family) for n in seen]
                total = torch.zeros_like(averaged[place])
                for home, share in zip(family, shares, strict=True):
                    owner = homes.owner(home)
                    total += share * (weight[place] if owner == me else by_key[owner, expert])
                averaged[place] = total
            state.weight.copy_(averaged.flatten())
            bucket.store(state.weight)
            on_the_way.append(bucket.publish())
    for result in on_the_way:
        result.get()


def rows_of_replicas(houses: Sequence[House]) -> list[dict[tuple[int, int], int]]:
    """(expert, rank) -> rows since the last average, over all copies; counting begins anew."""
    group, mesh = houses[0].buckets[0].group, houses[0].buckets[0].mesh
    width = max(house.homes.placement.max_slots for house in houses)
    mine = torch.zeros(len(houses), width, dtype=torch.int64)
    for number, house in enumerate(houses):
        for slot, count in enumerate(house.layer.schedule.take_computed()):
            mine[number, slot] = count
    everyone = gather(mesh.grads, group, mine.to(mesh.device), "rows of replicas").to_host()
    found = []
    for number, house in enumerate(houses):
        placement = house.homes.placement
        rows: dict[tuple[int, int], int] = {}
        for place, table in enumerate(everyone):
            rank = place % placement.num_ranks
            for slot, expert in enumerate(placement.slots[rank]):
                rows[expert, rank] = rows.get((expert, rank), 0) + table[number][slot]
        found.append(rows)
    return found
