"""Collectives on a lane, and the wire that rows take by them.

With one rank in the group nothing is sent and no copy is made. Sums are taken in rank order from gathered
parts, never inside a collective, wherever every rank must hold the same bits afterwards: then the result does
not depend on the algorithm a library picks. Gloo's all-to-all is several times faster than its all-gather and
all-reduce, so on gloo all of these are built on it; on NCCL the native collectives are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.lane import InFlight, Lane, OnHost, Ready, Then, Transfer
from moeclipse.comm.group import Group
from moeclipse.comm.transports.gloo_pairs import GlooPairs, PairsWork

# Newer torch renames both and warns about the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all(
    lane: Lane,
    group: Group,
    rows: torch.Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    label: str,
    out: torch.Tensor | None = None,
) -> InFlight[torch.Tensor]:
    """Send `send_counts[p]` leading rows to each peer p, in order; receive likewise. Zeros are legal."""
    if group.size == 1:
        return Ready(rows if out is None else out.copy_(rows))
    rows = rows.contiguous()
    if out is None:
        out = rows.new_empty((sum(receive_counts), *rows.shape[1:]))

    given = (out, rows, list(receive_counts), list(send_counts), group.handle)
    return lane.collective(group, label, partial(dist.all_to_all_single, *given), out, rows)


@dataclass(frozen=True)
class TorchTransport:
    """The wire (`Transport`) that is torch's own all-to-all.

    `pairs`: sends and receives of our own, on all ranks of the group or on none; rows are on the CPU.
    """

    lane: Lane
    group: Group
    pairs: GlooPairs | None = None

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        pairs = self.pairs
        if pairs is None:
            return all_to_all(self.lane, self.group, rows, send_counts, receive_counts, label, out)
        rows = rows.detach().contiguous()
        if out is None:
            out = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        leaving, arriving = rows.split(list(send_counts)), out.detach().split(list(receive_counts))

        def start() -> PairsWork:
            return pairs.exchange(leaving, arriving)

        return self.lane.launch(self.group, label, start, out, rows)


def gather(lane: Lane, group: Group, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
    """Every member's `value`, stacked in rank order: shape [P, *value.shape]."""
    return Ready(value.unsqueeze(0)) if group.size == 1 else _gather(lane, group, value, label)


def gather_to_host(lane: Lane, group: Group, value: torch.Tensor, label: str) -> InFlight[list[Any]]:
    """As `gather`, as a nested list."""
    if group.size == 1:
        return Then(Ready(value.unsqueeze(0)), torch.Tensor.tolist)
    return OnHost(_gather(lane, group, value, label))


def _gather(lane: Lane, group: Group, value: torch.Tensor, label: str) -> Transfer[torch.Tensor]:
    out = value.new_empty((group.size, *value.shape))
    if group.backend == "gloo":
        sent = value.expand(group.size, *value.shape).contiguous()
        call: Callable[..., Any] = dist.all_to_all_single
    else:
        sent, call = value.contiguous(), ALL_GATHER
    return lane.collective(group, label, partial(call, out, sent, group=group.handle), out, sent)


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
