"""Sums over ranks, and what belongs to them, on a lane. With one rank in the group nothing is sent or copied.

Sums are taken in rank order from gathered parts, never inside a collective, wherever every rank must hold the
same bits afterwards: then the result does not depend on the algorithm a library picks. Gloo's all-to-all is
several times faster than its all-gather and all-reduce, so on gloo all of these are built on it; on NCCL the
native collectives are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.lane import ALL_GATHER, InFlight, Lane, Ready, Then, all_to_all, gather
from moeclipse.comm.group import Group

# Newer torch renames it and warns about the old name.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in the order of ranks."""
    if len(parts) == 1:
        return parts[0]
    total, *others = parts
    total = total.clone()
    for part in others:
        total += part
    return total


def total(lane: Lane, group: Group, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
    """The sum of every member's `value`: the same bits on every rank."""
    return Then(gather(lane, group, value, label), sum_of_parts)


def all_reduce(lane: Lane, group: Group, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
    """The sum of every member's `value`, the same bits on every rank; `value` may be overwritten."""
    if group.size == 1:
        return Ready(value)
    if group.backend != "nccl":
        return total(lane, group, value, label)
    value = value.contiguous()
    return lane.collective(group, label, partial(dist.all_reduce, value, group=group.handle), value)


def reduce_scatter(
    lane: Lane, group: Group, flat: torch.Tensor, bounds: Sequence[int], label: str
) -> InFlight[torch.Tensor]:
    """Sum `flat` over the group; member p gets elements bounds[p]:bounds[p+1]. Shards may be uneven."""
    sizes = [stop - start for start, stop in pairwise(bounds)]
    if group.size == 1:
        return Ready(flat[bounds[0] : bounds[1]])
    mine = sizes[group.index]
    if group.backend == "nccl" and len(set(sizes)) == 1:
        out = flat.new_empty(mine)
        start = partial(REDUCE_SCATTER, out, flat, group=group.handle)
        return lane.collective(group, label, start, out, flat)
    parts = all_to_all(lane, group, flat, sizes, [mine] * group.size, label)
    return Then(parts, lambda arrived: sum_of_parts(arrived.view(group.size, mine)))


def all_gather_shards(
    lane: Lane, group: Group, flat: torch.Tensor, bounds: Sequence[int], label: str
) -> InFlight[torch.Tensor]:
    """Fill `flat` in place with every member's own shard of it."""
    if group.size == 1:
        return Ready(flat)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    mine = flat[bounds[group.index] : bounds[group.index + 1]]
    if group.backend == "nccl" and len(set(sizes)) == 1:
        return lane.collective(group, label, partial(ALL_GATHER, flat, mine, group=group.handle), flat)
    sent = mine.repeat(group.size)
    given = (flat, sent, sizes, [mine.numel()] * group.size, group.handle)
    return lane.collective(group, label, partial(dist.all_to_all_single, *given), flat, sent)
