"""Communicators before the first step.

NCCL makes a communicator when a group, or a pair of its ranks, is first used, and that call holds the host
until the other ranks make theirs. Inside a step that can be never: the other host may wait for something that
this one was about to launch. So ranks meet on every group as it is made, and on every pair that a program
sends between before the program runs, all of them in one order.

Contract: all ranks walk the same list; each takes part where it is a member. Gloo needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.lane import Lane
from moeclipse.comm.async_ops.work import Waitable
from moeclipse.comm.group import Group

WireEnds = tuple[Group, int, int]
"""Members `source` and `target` of a group, between which messages go in this direction."""


def connect_group(lane: Lane, group: Group) -> None:
    """The members of a group meet."""
    if group.backend != "nccl" or group.size == 1:
        return
    one = torch.zeros(1, device=lane.device)

    def start() -> Waitable | None:
        return dist.all_reduce(one, group=group.handle, async_op=True)

    lane.launch(group, f"opening of group {group.name}", start, one).settle()


def connect_wires(lane: Lane, wires: Iterable[WireEnds]) -> None:
    """The two ends of each wire meet, one wire after the other."""
    for group, source, target in wires:
        if group.backend != "nccl" or group.index not in (source, target):
            continue
        one = torch.zeros(1, device=lane.device)
        move, other = (dist.isend, target) if group.index == source else (dist.irecv, source)
        start = partial(move, one, group.ranks[other], group=group.handle)
        lane.launch(group, f"opening of wire {source}>{target} of {group.name}", start, one).settle()
