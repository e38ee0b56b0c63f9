"""Which wire is the fastest between these ranks: those that they can have, tried one after the other.

    times = wire_times(mesh, group)     {"direct": [small, large], "peer": [...]}: seconds of the slowest rank
    fastest(times)                      "peer", if it is faster by more than what such trials scatter

A trial sends as many bytes from every rank to every other, of two sizes: the small one is mostly latency.
Rows arrive in the same order over every wire, so the choice changes no bit. On devices the direct wire is
NCCL's, and no other is tried: what kernels and copy engines take from compute is not seen by ranks that rest.
"""

from __future__ import annotations

import time
from collections import Counter

import torch

from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.open import Wire, open_wire
from moeclipse.comm.transports.transport import Transport
from moeclipse.core.auto import Auto
from moeclipse.core.errors import ConfigError

PLAIN: Wire = "direct"
SIZES = {"cpu": (16 << 10, 256 << 10), "cuda": (1 << 20, 16 << 20)}
"""Bytes from each rank to each other."""
REPEATS = 7
MARGIN = 1.2
"""The plain wire stays unless it takes so many times as long."""


def wires_to_try(mesh: Mesh, group: Group) -> list[Wire]:
    """The plain one first. All ranks answer alike, whichever group of that name they are in."""
    families = [[mesh.hosts[rank] for rank in ranks] for ranks in mesh.partitions[group.name]]
    if mesh.device.type != "cpu" or group.size == 1:
        return [PLAIN]
    if all(len(set(hosts)) == 1 for hosts in families):
        return [PLAIN, "peer"]
    counts = [set(Counter(hosts).values()) for hosts in families]
    even = all(len(sizes) == 1 for sizes in counts)
    return [PLAIN, "two_level"] if even and any(max(sizes) > 1 for sizes in counts) else [PLAIN]


def wire_times(mesh: Mesh, group: Group) -> dict[Wire, list[float]]:
    """Of each wire that these ranks can have, by size; the same numbers on every rank. Collective, once."""
    return mesh.once(f"times of wires, {group.name}", lambda: _times(mesh, group))


def _times(mesh: Mesh, group: Group) -> dict[Wire, list[float]]:
    found: dict[Wire, list[float]] = {}
    for kind in wires_to_try(mesh, group):
        try:
            transport = open_wire(kind, mesh, group)
        except ConfigError:  # on all ranks alike
            continue
        mine = [seconds_of(transport, mesh, group, size) for size in SIZES[mesh.device.type]]
        found[kind] = [max(column) for column in zip(*mesh.gather_objects(mine), strict=True)]
    return found


def seconds_of(transport: Transport, mesh: Mesh, group: Group, size: int) -> float:
    """Median of one exchange, `size` bytes from every rank to every other."""
    counts = [0 if rank == group.index else size for rank in range(group.size)]
    rows = torch.zeros(sum(counts), dtype=torch.uint8, device=mesh.device)
    seconds = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        transport.all_to_all(rows, counts, counts, "trial of a wire").get()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds[1:])[REPEATS // 2]


def fastest(times: dict[Wire, list[float]]) -> Wire:
    """The plain one, unless another is faster by a margin at both sizes."""

    def wins(kind: Wire) -> bool:
        return all(MARGIN * mine <= plain for mine, plain in zip(times[kind], times[PLAIN], strict=True))

    costs: dict[Wire, float] = {kind: sum(both) for kind, both in times.items()}
    return Auto[Wire](costs=costs, plain=PLAIN, wins=wins).choice
