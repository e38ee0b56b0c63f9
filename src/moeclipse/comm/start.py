"""How ranks start and stop.

`start` joins what torchrun (or our launcher) set up. Its store is prefixed by the attempt, because a
restarted rank would otherwise read the address of its dead predecessor, and by the number of starts in
this process, so that start - stop - start works. `stop` takes no argument and may be called twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from moeclipse.comm.failure import Watch
from moeclipse.core.errors import CommError, ConfigError


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """What the launcher told this process."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    attempt: int = 0

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> RankPlace:
        env = os.environ if environment is None else environment
        return cls(
            rank=int(env.get("RANK", "0")),
            num_ranks=int(env.get("WORLD_SIZE", "1")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_ranks=int(env.get("LOCAL_WORLD_SIZE", "1")),
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """The device of this rank; "auto" takes CUDA where there is any."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda', but torch sees no CUDA device; use --run.device cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def cuda_settings(pp: int) -> dict[str, str]:
    """What CUDA must read from the environment before it starts, for ranks that wait for each other.

    Streams share a few hardware queues, and work behind a transfer that waits for its peer waits with it: so
    as many queues as there can be. A kernel that is loaded when it is first used waits for such a transfer,
    too, and which kernels a step uses depends on how many rows experts get. Stages of a pipeline wait for
    each other both ways, so there all kernels are loaded at the start, which takes some ten seconds.
    """
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    return settings | ({"CUDA_MODULE_LOADING": "EAGER"} if pp > 1 else {})


def start(
    place: RankPlace,
    *,
    device: torch.device,
    deadline_s: float = 60.0,
    start_deadline_s: float = 300.0,
    store: dist.Store | None = None,
) -> Watch:
    """Join the other ranks. One rank alone opens nothing."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.num_ranks == 1:
        return Watch(store=None, rank=0, num_ranks=1, deadline_s=deadline_s)
    patience = timedelta(seconds=start_deadline_s)
    if store is None:
        store = open_store(place, patience)
    count = store.add(f"starts/{place.attempt}/{place.rank}", 1)
    store = dist.PrefixStore(f"attempt_{place.attempt}/start_{count}", store)
    store.set_timeout(patience)
    shared = device.type == "cuda" and place.local_ranks > torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shared else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.num_ranks,
        # Our own deadlines come first and know the collective's name; this one is the last resort.
        timeout=max(patience, timedelta(seconds=2 * deadline_s)),
    )
    watch_store = dist.PrefixStore("watch", store)
    return Watch(store=watch_store, rank=place.rank, num_ranks=place.num_ranks, deadline_s=deadline_s)


def open_store(place: RankPlace, patience: timedelta) -> dist.Store:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        raise CommError(
            f"this process is rank {place.rank} of {place.num_ranks}, but MASTER_ADDR and MASTER_PORT are "
            "not set; start it with `moeclipse train --ranks N` or with torchrun"
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent
    return dist.TCPStore(
        host, int(port), None if agent else place.num_ranks, is_master=serves, timeout=patience
    )


def stop() -> None:
    """Leave all groups; harmless when none was joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
