"""Memory that is left for a rank, or that it has at all.

Hazard. What other programs take later is not foreseen.
"""

from __future__ import annotations

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.host_memory import available_memory, whole_memory


def room_on(device: torch.device) -> float:
    """Bytes for this process: what is free, and what its allocator has."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))


def memory_left(mesh: Mesh) -> float:
    """Bytes for this rank, before its model is there: what is free, shared with others of its host."""
    if mesh.device.type == "cpu":
        return available_memory() / mesh.ranks_here
    return room_on(mesh.device) / -(-mesh.ranks_here // max(torch.cuda.device_count(), 1))


def memory_given(mesh: Mesh) -> float:
    """Bytes of this rank's part of a host, whoever uses it now: the same in every run. Devices: not known."""
    return whole_memory() / mesh.ranks_here if mesh.device.type == "cpu" else 0.0
