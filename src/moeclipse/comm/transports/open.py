"""Which wire the rows of a layer take; `moe.transport` names it.

    direct      torch.distributed, rank to rank
    two_level   inside the host, then across hosts (`two_level`)
    peer        within a host, through memory that ranks can read of each other (`host_ring`; on devices
                copy engines pull from the senders, `copy_engines` with through="device")
    pinned      within a host, through pinned memory of the host, by copy engines (`copy_engines`)
    auto        direct, where no run has chosen (`train/run/resolve_auto` does, by trial)

A wire that these ranks cannot have is an error at start, on all of them alike: who names one wants it.
"""

from __future__ import annotations

from typing import Literal

from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.shared.host import NoPeerMemoryError
from moeclipse.comm.transports.copy_engines import pinned
from moeclipse.comm.transports.host_ring import PeerExchange, PeerTransport
from moeclipse.comm.transports.transport import Transport, direct
from moeclipse.comm.transports.two_level import two_level
from moeclipse.core.errors import ConfigError

Wire = Literal["direct", "two_level", "peer", "pinned", "auto"]


def open_wire(kind: Wire, mesh: Mesh, group: Group) -> Transport:
    """Collective over all ranks, made once for each group of the mesh and kept there."""
    if kind == "two_level":
        return two_level(mesh, group)
    if kind in ("direct", "auto") or group.size == 1:
        return direct(mesh, group, mesh.hosts)
    if kind == "peer" and mesh.device.type == "cpu":
        exchange = mesh.once(f"peer {group.name}", lambda: PeerExchange.open(group, mesh.watch))
        if exchange.obstacle:
            raise _cannot(kind, group, exchange.obstacle)
        return PeerTransport(mesh.a2a, exchange)
    try:
        return pinned(mesh, group, through="device" if kind == "peer" else "host")
    except NoPeerMemoryError as error:
        raise _cannot(kind, group, str(error)) from None


def _cannot(kind: Wire, group: Group, reason: str) -> ConfigError:
    return ConfigError(
        f'moe.transport = "{kind}" does not work between ranks {group.ranks}: {reason}; '
        'use moe.transport = "direct", or "two_level" across hosts'
    )
