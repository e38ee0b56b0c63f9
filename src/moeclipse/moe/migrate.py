"""Experts on the way from rank to rank: one uneven exchange of parcels, each with a canary.

A parcel is one expert's weights, or its master weights and moments, as bytes. In front of it travels a
header: (canary, layer, expert, what it is, optimizer steps, length). Whoever opens it checks every number,
because both ends work out from two placements alone who sends what, and an expert that arrives in another's
place would train on without a word.

    all ranks    ship(parcels, ...)    every rank names the same parcels in the same order; most send nothing

Nothing is installed here: `ship` returns what arrived, and its caller puts it into place after all of it has
been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moeclipse.balance.homes import Parcel
from moeclipse.comm.flight.exchange import all_to_all
from moeclipse.comm.flight.lane import Lane
from moeclipse.comm.group import Group
from moeclipse.core.errors import CommError

CANARY = 0x6D6F65636C697073  # "moeclips"
HEADER = 6 * 8


def header(parcel: Parcel, layer: int, updates: int, length: int) -> list[int]:
    return [CANARY, layer, parcel.expert, int(parcel.state), updates, length]


def ship(
    parcels: Sequence[Parcel],
    pack: Callable[[Parcel], torch.Tensor],
    length: Callable[[Parcel], int],
    *,
    group: Group,
    lane: Lane,
    layer: int,
    updates: int,
) -> dict[Parcel, torch.Tensor]:
    """The bytes of every parcel for this rank. Collective; `pack` is asked for what this rank sends."""
    me, size = group.index, group.size
    device = lane.device
    sends = sorted((p for p in parcels if p.source == me), key=lambda p: p.target)
    takes = sorted((p for p in parcels if p.target == me), key=lambda p: p.source)
    parts: list[torch.Tensor] = []
    for parcel in sends:
        content = pack(parcel)
        front = torch.tensor(header(parcel, layer, updates, content.numel()), dtype=torch.int64)
        parts += [front.to(device).view(torch.uint8), content]
    buffer = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    leaving, arriving = [0] * size, [0] * size
    for parcel in sends:
        leaving[parcel.target] += HEADER + length(parcel)
    for parcel in takes:
        arriving[parcel.source] += HEADER + length(parcel)
    what = f"migration of experts, layer {layer}"
    arrived = all_to_all(lane, group, buffer, leaving, arriving, what).get()
    found: dict[Parcel, torch.Tensor] = {}
    start = 0
    for parcel in takes:
        stop = start + HEADER + length(parcel)
        expected = header(parcel, layer, updates, length(parcel))
        label = arrived[start : start + HEADER].clone().view(torch.int64).tolist()
        if label != expected:
            raise CommError(
                f"rank {group.ranks[parcel.source]} sent {words(label)}, but rank {group.ranks[me]} waits "
                f"for {words(expected)}; no weight was changed here; resume from the last checkpoint"
            )
        found[parcel] = arrived[start + HEADER : stop].clone()
        start = stop
    return found


def words(label: Sequence[int]) -> str:
    canary, layer, expert, state, updates, length = label
    if canary != CANARY:
        return "bytes that are no parcel"
    what = "optimizer state" if state else "weights"
    return f"the {what} of expert {expert}, layer {layer}, after {updates} updates, {length} bytes"
