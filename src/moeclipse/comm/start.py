"""How ranks start and stop.

`start` joins what torchrun (or our launcher) set up. Its store is prefixed by a name that is new for every
start (`comm/meet`), because a restarted rank would otherwise read the address of its dead predecessor.
`stop` may be called twice.

The store has no lock: whoever reaches its port reads and writes it. It listens on the address by which ranks
know it, not on all that the host has, and what ranks say there about failures is signed with a secret that
they agree on without it (`shared_secret`).
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Protocol, TextIO
from weakref import WeakSet

import torch
import torch.distributed as dist

from moeclipse.comm.failure import Watch
from moeclipse.comm.meet import meet
from moeclipse.comm.watch.op_log import MARKS, DeviceMarks, OpLog
from moeclipse.comm.watch.reach import own_address
from moeclipse.core.errors import CommError, ConfigError

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
MPS, MPS_DEFAULT = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
"""Where its daemon listens; the driver looks there, too, where nothing is set."""
SECRET = "MOECLIPSE_SECRET"
"""A secret of the run's own, where a launcher or a user hands one down."""
Backend = Literal["auto", "nccl", "gloo"]
"""auto: NCCL where each rank has a GPU of its own, else gloo; nccl: also where ranks share one."""


class CapturedGraph(Protocol):
    def reset(self) -> None: ...


GRAPHS = WeakSet[CapturedGraph]()
"""That may hold transfers of this process' groups."""


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
    each other both ways, so there all kernels are loaded at the start, which takes some ten seconds. Memory
    for products is of one size, so that `run.deterministic` can promise their bits.
    """
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return settings | ({"CUDA_MODULE_LOADING": "EAGER"} if pp > 1 else {})


def nccl_settings(deadline_s: float) -> dict[str, str]:
    """So that our deadline speaks first.

    Torch would end the process in the middle of a sentence when a peer's connection closes, and when its own
    watch thread was held up for eight minutes.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(480, 4 * math.ceil(deadline_s))),
    }


def shared_gpu_settings(rank: int, num_ranks: int) -> dict[str, str]:
    """NCCL refuses two ranks of one host on one GPU; ranks of several hosts talk over sockets.

    MPS has 96 hardware queues for all processes together: a fourth one with 32 would not start.
    """
    mps = Path(os.environ.get(MPS, MPS_DEFAULT), "control").exists()
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": str(min(32, 64 // num_ranks))} if mps else {}
    return queues | {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def device_settings(place: RankPlace, *, pp: int, deadline_s: float, backend: Backend) -> dict[str, str]:
    """What a rank's environment must say before CUDA and NCCL start; what a user has set comes first."""
    settings = cuda_settings(pp) | nccl_settings(deadline_s)
    # Counted through NVML: asking CUDA itself would start it.
    if backend == "nccl" and 0 < torch.cuda.device_count() < place.local_ranks:
        settings |= shared_gpu_settings(place.rank, place.num_ranks)
    return settings


def start(
    place: RankPlace,
    *,
    device: torch.device,
    deadline_s: float = 60.0,
    start_deadline_s: float = 300.0,
    store: dist.Store | None = None,
    backend: Backend = "auto",
) -> Watch:
    """Join the other ranks. One rank alone opens nothing."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.num_ranks == 1:
        return Watch(store=None, rank=0, num_ranks=1, deadline_s=deadline_s)
    patience = timedelta(seconds=start_deadline_s)
    if store is None:
        store = open_store(place, patience)
    store.set_timeout(patience)
    store = dist.PrefixStore(f"start_{meet(store, place.rank, place.num_ranks, patience)}", store)
    shared = device.type == "cuda" and place.local_ranks > torch.cuda.device_count()
    by_nccl = device.type == "cuda" and (backend == "nccl" or (backend == "auto" and not shared))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if by_nccl else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.num_ranks,
        # Our own deadlines come first and know the collective's name; this one is the last resort.
        timeout=max(patience, timedelta(seconds=2 * deadline_s)),
    )
    return Watch(
        store=dist.PrefixStore("watch", store),
        rank=place.rank,
        num_ranks=place.num_ranks,
        deadline_s=deadline_s,
        log=open_log(place, on_device=by_nccl),
        secret=shared_secret(torch.device("cpu")),
        address=own_address(interface_of(os.environ)),
    )


def interface_of(environment: Mapping[str, str]) -> str:
    """Which one gloo or NCCL were told to use; nothing where they choose."""
    named = [environment[name] for name in INTERFACES if environment.get(name)]
    return named[0].lstrip("=").split(",")[0] if named else ""


def shared_secret(device: torch.device) -> bytes:
    """What all ranks know and nobody else; collective.

    Rank 0 draws it and sends it over the connections of the process group, which no neighbour can read.
    Where ranks were started with a secret, it is part of it: whoever joined in place of a rank lacks it.
    """
    drawn = torch.tensor(list(secrets.token_bytes(32)), dtype=torch.uint8, device=device)
    dist.broadcast(drawn, 0)
    return hashlib.sha256(os.environ.get(SECRET, "").encode() + bytes(drawn.tolist())).digest()


def open_log(place: RankPlace, on_device: bool) -> OpLog:
    """The log of a rank's ops, in a file where a launcher gave the rank a folder."""
    folder = rank_folder()
    marks = DeviceMarks(MARKS) if on_device else None
    try:
        return OpLog(folder / "ops.txt" if folder is not None else None, rank=place.rank, marks=marks)
    except OSError:  # a full disk must not keep a run from starting
        return OpLog(rank=place.rank, marks=marks)


def open_stacks() -> TextIO | None:
    """Where the fault handler writes; open for the rank's whole life."""
    folder = rank_folder()
    try:
        return None if folder is None else (folder / "stacks.txt").open("w")
    except OSError:
        return None


def rank_folder() -> Path | None:
    """The folder that a launcher made for this rank's files: torch's agents name one for its error."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file else None


def open_store(place: RankPlace, patience: timedelta) -> dist.Store:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        raise CommError(
            f"this process is rank {place.rank} of {place.num_ranks}, but MASTER_ADDR and MASTER_PORT are "
            "not set; start it with `moeclipse train --ranks N` or with torchrun"
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not agent
    here = place.local_ranks == place.num_ranks
    listener = listen_at(host, int(port), here) if serves else None
    return dist.TCPStore(
        host,
        int(port),
        None if agent else place.num_ranks,
        is_master=serves,
        timeout=patience,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def listen_at(host: str, port: int, here: bool) -> socket.socket | None:
    """A socket that listens on the address alone by which ranks know the store; `here`: all are on this host.

    None where that cannot be said: other hosts may know a name by another address than this one does, and an
    address may not be the host's own (a service, NAT).
    """
    try:
        name = "" if here else str(ip_address(host))
        family, kind, _, _, address = socket.getaddrinfo(name or host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except (OSError, ValueError):
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        return None
    return listener


def leave_groups() -> None:
    """NCCL waits until no graph holds a transfer of a group, whoever still holds the graph."""
    for graph in tuple(GRAPHS):
        graph.reset()
    dist.destroy_process_group()


def stop(patience_s: float | None = None) -> None:
    """Leave all groups; harmless when none was joined. Graphs that were captured cannot be replayed any more.

    `patience_s`: where a peer is lost. A transport takes no group apart before the time-outs of what is under
    way are over, which are minutes; after so many seconds that is left to a thread.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    if patience_s is None:
        leave_groups()
        return
    leaving = threading.Thread(target=leave_groups, name="moeclipse-leaving", daemon=True)
    leaving.start()
    leaving.join(patience_s)
