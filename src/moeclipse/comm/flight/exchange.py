"""Collectives on a lane. With one rank in the group nothing is sent and no copy is made.

Sums are taken in rank order from gathered parts, never inside a collective, wherever every rank must
hold the same bits afterwards: then the result does not depend on the algorithm a library picks.
Gloo's all-to-all is several times faster than its all-gather and all-reduce, so on gloo all of these
are built on it; on NCCL the native collectives are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from moeclipse.comm.flight.lane import Lane, Ticket
from moeclipse.comm.group import Group

# Newer torch renames both and warns about the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Result:
    """A tensor that may be still on its way; `get` waits for it."""

    def __init__(self, value: torch.Tensor, ticket: Ticket | None = None) -> None:
        self._value, self._ticket = value, ticket

    def get(self) -> torch.Tensor:
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
        return self._value

    def to_host(self) -> list[Any]:
        """As a nested list. The one place where the host waits for the device, so deadlines count here."""
        if self._ticket is not None:
            self._ticket.settle()
        return self.get().tolist()


def all_to_all(
    lane: Lane,
    group: Group,
    rows: torch.Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    label: str,
    out: torch.Tensor | None = None,
) -> Result:
    """Send `send_counts[p]` leading rows to each peer p, in order; receive likewise. Zeros are legal."""
    if group.size == 1:
        return Result(rows if out is None else out.copy_(rows))
    rows = rows.contiguous()
    if out is None:
        out = rows.new_empty((sum(receive_counts), *rows.shape[1:]))

    def start() -> Any:
        return dist.all_to_all_single(
            out, rows, list(receive_counts), list(send_counts), group=group.handle, async_op=True
        )

    return Result(out, lane.launch(group, label, start, (out, rows)))


def gather(lane: Lane, group: Group, value: torch.Tensor, label: str) -> Result:
    """Every member's `value`, stacked in rank order: shape [P, *value.shape]."""
    if group.size == 1:
        return Result(value.unsqueeze(0))
    out = value.new_empty((group.size, *value.shape))
    if group.backend == "gloo":
        sent = value.expand(group.size, *value.shape).contiguous()

        def start() -> Any:
            return dist.all_to_all_single(out, sent, group=group.handle, async_op=True)
    else:
        sent = value.contiguous()

        def start() -> Any:
            return ALL_GATHER(out, sent, group=group.handle, async_op=True)

    return Result(out, lane.launch(group, label, start, (out, sent)))


class RankSum:
    """A sum over ranks whose parts are on their way; `get` adds them in rank order."""

    def __init__(self, parts: Result, num_parts: int) -> None:
        self._parts, self._num_parts = parts, num_parts

    def get(self) -> torch.Tensor:
        parts = self._parts.get()
        if self._num_parts == 1:
            return parts
        total, *others = parts.unflatten(0, (self._num_parts, -1))
        total = total.clone()
        for part in others:
            total += part
        return total

    def parts(self) -> torch.Tensor:
        """What each rank gave, in rank order; where the library has added up already there is one part."""
        return self._parts.get().unflatten(0, (self._num_parts, -1))


def total(lane: Lane, group: Group, value: torch.Tensor, label: str) -> RankSum:
    """The sum of every member's `value`: the same bits on every rank."""
    parts = gather(lane, group, value, label)
    return RankSum(Result(parts._value.flatten(0, 1), parts._ticket), group.size)


def all_reduce(lane: Lane, group: Group, value: torch.Tensor, label: str) -> Result | RankSum:
    """The sum of every member's `value`, the same bits on every rank; `value` may be overwritten."""
    if group.size == 1:
        return Result(value)
    if group.backend != "nccl":
        return total(lane, group, value, label)
    value = value.contiguous()

    def start() -> Any:
        return dist.all_reduce(value, group=group.handle, async_op=True)

    return Result(value, lane.launch(group, label, start, value))


def reduce_scatter(
    lane: Lane, group: Group, flat: torch.Tensor, bounds: Sequence[int], label: str
) -> RankSum:
    """Sum `flat` over the group; member p gets elements bounds[p]:bounds[p+1]. Shards may be uneven."""
    sizes = [stop - start for start, stop in pairwise(bounds)]
    if group.size == 1:
        return RankSum(Result(flat[bounds[0] : bounds[1]]), 1)
    mine = sizes[group.index]
    if group.backend == "nccl" and len(set(sizes)) == 1:
        out = flat.new_empty(mine)

        def start() -> Any:
            return REDUCE_SCATTER(out, flat, group=group.handle, async_op=True)

        return RankSum(Result(out, lane.launch(group, label, start, (out, flat))), 1)
    return RankSum(all_to_all(lane, group, flat, sizes, [mine] * group.size, label), group.size)


def all_gather_shards(
    lane: Lane, group: Group, flat: torch.Tensor, bounds: Sequence[int], label: str
) -> Result:
    """Fill `flat` in place with every member's own shard of it."""
    if group.size == 1:
        return Result(flat)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    mine = flat[bounds[group.index] : bounds[group.index + 1]]
    if group.backend == "nccl" and len(set(sizes)) == 1:

        def start_native() -> Any:
            return ALL_GATHER(flat, mine, group=group.handle, async_op=True)

        return Result(flat, lane.launch(group, label, start_native, flat))
    sent = mine.repeat(group.size)

    def start() -> Any:
        counts = [mine.numel()] * group.size
        return dist.all_to_all_single(flat, sent, sizes, counts, group=group.handle, async_op=True)

    return Result(flat, lane.launch(group, label, start, (flat, sent)))
