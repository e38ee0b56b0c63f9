"""Experts on the way from rank to rank: one uneven exchange of all transfers, each behind a header.

A transfer is one expert's weights, or master weights and moments of a part of it, as bytes. In front of it
travels a header: (canary, layer, expert, what it is, part, optimizer steps, length). The receiver checks
every number, because both ends work out from two placements alone who sends what, and an expert that arrives
in another's place would train on without a word.

    all ranks    exchange_experts(transfers, ...)    every rank names the same ones in the same order

Nothing is installed here: what arrived is returned, and the caller puts it into place after all of it has
been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moeclipse.balance.ownership import ExpertTransfer
from moeclipse.comm.async_ops.lane import Lane, all_to_all
from moeclipse.comm.group import Group
from moeclipse.core.errors import CommError

CANARY = 0x6D6F65636C697073  # "moeclips"
HEADER = 7 * 8


def header(transfer: ExpertTransfer, layer: int, updates: int, length: int) -> list[int]:
    return [CANARY, layer, transfer.expert, int(transfer.state), part_of(transfer), updates, length]


def part_of(transfer: ExpertTransfer) -> int:
    """A number for the elements that travel: what the old owner and the new one both have."""
    number = 0
    for owner in transfer.owners or ():
        number = (number << 32) + (owner.part << 16) + owner.parts
    return number


def exchange_experts(
    transfers: Sequence[ExpertTransfer],
    pack: Callable[[ExpertTransfer], torch.Tensor],
    length: Callable[[ExpertTransfer], int],
    *,
    group: Group,
    lane: Lane,
    layer: int,
    updates: int,
) -> dict[ExpertTransfer, torch.Tensor]:
    """The bytes of every transfer to this rank. Collective; `pack` is asked for what this rank sends."""
    me, size = group.index, group.size
    device = lane.device
    sends = sorted((t for t in transfers if t.source == me), key=lambda t: t.target)
    takes = sorted((t for t in transfers if t.target == me), key=lambda t: t.source)
    parts: list[torch.Tensor] = []
    for transfer in sends:
        content = pack(transfer)
        front = torch.tensor(header(transfer, layer, updates, content.numel()), dtype=torch.int64)
        parts += [front.to(device).view(torch.uint8), content]
    buffer = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    leaving, arriving = [0] * size, [0] * size
    for transfer in sends:
        leaving[transfer.target] += HEADER + length(transfer)
    for transfer in takes:
        arriving[transfer.source] += HEADER + length(transfer)
    what = f"migration of experts, layer {layer}"
    arrived = all_to_all(lane, group, buffer, leaving, arriving, what).get()
    found: dict[ExpertTransfer, torch.Tensor] = {}
    start = 0
    for transfer in takes:
        stop = start + HEADER + length(transfer)
        expected = header(transfer, layer, updates, length(transfer))
        label = arrived[start : start + HEADER].clone().view(torch.int64).tolist()
        if label != expected:
            raise CommError(
                f"rank {group.ranks[transfer.source]} sent {words(label)}, but rank {group.ranks[me]} waits "
                f"for {words(expected)}; no weight was changed here; resume from the last checkpoint"
            )
        found[transfer] = arrived[start + HEADER : stop].clone()
        start = stop
    return found


def words(label: Sequence[int]) -> str:
    canary, layer, expert, state, part, updates, length = label
    if canary != CANARY:
        return "bytes that hold no expert"
    what = "optimizer state" if state else "weights"
    if part:
        old, new = (f"part {n >> 16 & 0xFFFF} of {n & 0xFFFF}" for n in (part >> 32, part))
        what = f"{what} (from {old}, for {new})"
    return f"the {what} of expert {expert}, layer {layer}, after {updates} updates, {length} bytes"
