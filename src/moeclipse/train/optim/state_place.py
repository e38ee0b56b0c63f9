"""The optimizer of a run, with as much of its state on the host as was chosen, if there is room for it.

Contract: which buckets travel is a pure function of names and sizes (`schedule/state_travel.spread`), the
same on all ranks that share them.
"""

from __future__ import annotations

from typing import Protocol

from moeclipse.comm.async_ops.host_lane import HostLane
from moeclipse.comm.mesh import Mesh
from moeclipse.core.host_memory import available_memory
from moeclipse.schedule.state_travel import spread, update_order
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.adamw import AdamW, TravellingWeights
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.optim.host_states import HostStates, LiesOnHost


class HeldWeights(LiesOnHost, TravellingWeights, Protocol):
    """Weights of experts (`train/step/host_weights`)."""


SPARED = 0.9
"""Of the host's free memory that state may take: files are read and written through the rest."""


def optimizer_of(
    config: TrainConfig,
    mesh: Mesh,
    buckets: Buckets,
    share: float,
    *,
    next_forward: bool,
    weights: HeldWeights | None = None,
) -> AdamW:
    """The optimizer of a run, `share` of its state on the host; updates may be those of the step before.

    `weights`: where those of experts lie there already.
    """
    seed = config.run.seed
    sizes = [(bucket.name, float(bucket.bounds[-1])) for bucket in buckets]
    names = spread(sizes, share) if config.memory.travels else []
    if not names:
        return AdamW(buckets, config.optim, seed, weights=weights)
    lane, beside = (None, 0) if weights is None else (weights.lane, weights.num_bytes)
    lane = lane or HostLane(mesh.device, mesh.recorder, 1e9 * config.memory.copy_gb_s)
    host = HostStates(lane, config.memory, names, room_for(config, mesh, beside))
    order = update_order(len(buckets.buckets), next_forward=next_forward)
    host.prepare([buckets.buckets[number] for number in order], config.optim)
    return AdamW(buckets, config.optim, seed, host, weights)


def room_for(config: TrainConfig, mesh: Mesh, beside: float = 0.0) -> float:
    """Bytes of the host's memory that this rank may take; `beside`: what it has taken, and written to."""
    given = 1e9 * config.memory.host_gb
    left = SPARED * available_memory() / mesh.ranks_here
    return min(given - beside, left) if given else left
