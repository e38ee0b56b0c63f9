"""Which optimizer state lies on the host: all of it, a share, or what does not fit the device.

Idea. Buckets that travel are spread evenly over backward: of every ten in a row as many as the share says, so
that the wire works while the layers between them compute. Small ones stay: a copy of some kilobytes costs
more than it saves.

Contract: a pure function of names and sizes, the same on all ranks that share them.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeclipse.comm.async_ops.host_lane import HostLane
from moeclipse.comm.mesh import Mesh
from moeclipse.core.host_memory import available_memory
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.adamw import AdamW
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.optim.host_states import HostStates

SPARED = 0.9
"""Of the host's free memory that state may take: files are read and written through the rest."""
SMALLEST = 1e-4
"""Part of all state below which a bucket stays on the device."""


def optimizer_of(config: TrainConfig, mesh: Mesh, buckets: Buckets, share: float) -> AdamW:
    """The optimizer of a run, `share` of its state on the host."""
    seed = config.run.seed
    sizes = [(bucket.name, float(bucket.bounds[-1])) for bucket in buckets]
    names = spread(sizes, share) if config.memory.travels else []
    if not names:
        return AdamW(buckets, config.optim, seed)
    rate = 1e9 * config.memory.copy_gb_s
    host = HostStates(
        HostLane(mesh.device, mesh.recorder, rate), config.memory, names, room_for(config, mesh)
    )
    host.prepare(buckets.buckets, config.optim)
    return AdamW(buckets, config.optim, seed, host)


def room_for(config: TrainConfig, mesh: Mesh) -> float:
    """Bytes of the host's memory that this rank may take."""
    given = 1e9 * config.memory.host_gb
    left = SPARED * available_memory() / mesh.ranks_here
    return min(given, left) if given else left


def spread(sizes: Sequence[tuple[str, float]], share: float) -> list[str]:
    """Names of buckets that travel, by (name, size) in the order of their updates."""
    total = sum(size for _, size in sizes)
    found, seen, taken = list[str](), 0.0, 0.0
    for name, size in sizes:
        if size <= SMALLEST * total:
            continue
        seen += size
        if taken + size / 2 <= share * seen:
            taken += size
            found.append(name)
    return found
