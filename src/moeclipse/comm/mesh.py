"""Ranks, their axes and groups, and how they start and stop.

Ranks are numbered with tp running fastest, then ep, then dp, then pp:

    rank = ((pp_index * dp + dp_index) * ep + ep_index) * tp + tp_index

The ranks of one pp_index hold the same layers; the tp ranks of one `tensor` group read the same tokens and
hold cuts of the same dense weights; every data index reads its own tokens. A mesh of one rank has no process
group at all; whatever would communicate is skipped. All ranks create all groups in one order; but for the
first and the last, all lie inside one pp_index:

    world          all ranks
    stage          one pp_index: dp x ep x tp ranks       dense_grads   the same, for gradients
    tensor         one data index: tp ranks               data          one tp_index: dp x ep ranks
    experts        one dp_index: ep x tp ranks            cut_grads     the same as data, for gradients
    shard_experts  one dp_index, one tp_index: ep ranks   replicas      one ep_index and tp_index: dp ranks
    pipes          one place in a stage: pp ranks, four times over (`pipe`)

`start` joins what torchrun (or our launcher) set up. Its store is prefixed by the attempt, because a
restarted rank would otherwise read the address of its dead predecessor, and by the number of starts in
this process, so that start - stop - start works. `stop` takes no argument and may be called twice.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moeclipse.comm.failure import Watch
from moeclipse.comm.lane import Lane
from moeclipse.comm.record import Recorder
from moeclipse.core.errors import CommError, ConfigError

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some ranks that communicate; `index` is this rank's place among them."""

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = field(default=None, repr=False)
    backend: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """This rank's place among all ranks, with its groups, lanes and recorder."""

    def __init__(
        self,
        *,
        dp: int,
        ep: int,
        tp: int = 1,
        pp: int = 1,
        rank: int,
        device: torch.device,
        watch: Watch,
        hosts: Sequence[Any] | None = None,
        comm_sms: int = 0,
    ) -> None:
        """`hosts` names the host of each rank, alike on all ranks; left out, the machines are asked.

        `comm_sms` bounds the multiprocessors that NCCL's kernels take; 0: NCCL decides.
        """
        self.comm_sms = comm_sms
        self.dp, self.ep, self.tp, self.pp = dp, ep, tp, pp
        per_stage = dp * ep * tp
        self.rank, self.num_ranks = rank, per_stage * pp
        self.pp_index, place = divmod(rank, per_stage)
        self.data_index, self.tp_index = divmod(place, tp)
        self.dp_index, self.ep_index = divmod(self.data_index, ep)
        self.num_data = dp * ep
        self.device, self.watch = device, watch
        self.recorder = Recorder(device)
        self.a2a = Lane("a2a", device, self.recorder, watch)
        self.grads = Lane("dp", device, self.recorder, watch)
        self.tp_comm = Lane("tp", device, self.recorder, watch)
        if hosts is not None:
            self.hosts = number_hosts(hosts, self.num_ranks)
        self.partitions: dict[str, list[tuple[int, ...]]] = {}
        self._kept: dict[str, Any] = {}
        self._make_groups(per_stage)

    def _make_groups(self, per_stage: int) -> None:
        dp, tp, block = self.dp, self.tp, self.ep * self.tp
        starts = range(0, self.num_ranks, per_stage)
        stages = [tuple(range(first, first + per_stage)) for first in starts]
        rows = [stage[d * block : (d + 1) * block] for stage in stages for d in range(dp)]
        columns = [stage[e::block] for stage in stages for e in range(block)]
        self.world = self.new_group("world", [tuple(range(self.num_ranks))])
        self.stage = self.world if self.pp == 1 else self.new_group("stage", stages)
        self.experts = self.new_group("experts", rows)
        # Gradient reductions run beside everything else, so they have communicators of their own.
        self.dense_grads = self.new_group("dense_grads", stages)
        self.replicas = self.new_group("replicas", columns)
        self.data, self.cut_grads, self.shard_experts = self.stage, self.dense_grads, self.experts
        blocks = [tuple(range(k, k + tp)) for k in range(0, self.num_ranks, tp)]
        self.tensor = self.new_group("tensor", blocks)
        if tp > 1:
            strides = [stage[t::tp] for stage in stages for t in range(tp)]
            self.data = self.new_group("data", strides)
            self.cut_grads = self.new_group("cut_grads", strides)
            self.shard_experts = self.new_group(
                "shard_experts", [row[t::tp] for row in rows for t in range(tp)]
            )
        # One communicator for each direction and each of F and B: a posted receive never blocks a send.
        self._pipes: dict[tuple[str, bool], Group] = {}
        if self.pp > 1:
            lines = [tuple(range(place, self.num_ranks, per_stage)) for place in range(per_stage)]
            for letter in ("F", "B"):
                for up in (True, False):
                    name = f"pipe.{letter}.{'up' if up else 'down'}"
                    self._pipes[letter, up] = self.new_group(name, lines)

    @property
    def line(self) -> Group:
        """This place in every stage: pp ranks."""
        return self._pipes["F", True] if self.pp > 1 else Group(name="line", ranks=(self.rank,), index=0)

    def ends(self) -> Group:
        """This place in the first and in the last stage; collective."""
        per_stage = self.num_ranks // self.pp
        last = self.num_ranks - per_stage
        members: list[tuple[int, ...]] = [(place, last + place) for place in range(per_stage)]
        members += [(rank,) for rank in range(per_stage, last)]
        return self.once("ends", lambda: self.new_group("ends", members))

    def pipe(self, letter: str, source: int, target: int) -> Group:
        """The communicator of activations ("F") or gradients ("B") from pp_index `source` to `target`."""
        return self._pipes[letter, source < target]

    @property
    def groups(self) -> list[Group]:
        """Every group this rank is a member of, each once."""
        groups = [self.world, self.stage, self.experts, self.dense_grads, self.replicas, self.data]
        groups += [self.cut_grads, self.tensor, self.shard_experts]
        return list({group.name: group for group in groups}.values())

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> Mesh:
        """One rank, no process group."""
        watch = Watch(store=None, rank=0, num_ranks=1, deadline_s=60.0)
        return cls(dp=1, ep=1, rank=0, device=torch.device(device), watch=watch)

    @classmethod
    def of_world(
        cls,
        *,
        dp: int = 1,
        ep: int = 1,
        tp: int = 1,
        pp: int = 1,
        device: str | torch.device = "cpu",
        deadline_s: float = 60.0,
        hosts: Sequence[Any] | None = None,
    ) -> Mesh:
        """Over the process group that torch.distributed already has (a user's own set-up)."""
        num_ranks = dp * ep * tp * pp
        if not dist.is_initialized():
            if num_ranks == 1:
                return cls.single(device)
            raise CommError(
                f"Mesh.of_world(dp={dp}, ep={ep}, tp={tp}, pp={pp}) needs torch.distributed; "
                "call init_process_group first"
            )
        if num_ranks != dist.get_world_size():
            raise ConfigError(
                f"dp ({dp}) x ep ({ep}) x tp ({tp}) x pp ({pp}) must equal the number of ranks "
                f"({dist.get_world_size()})"
            )
        store = dist.PrefixStore("moeclipse", dist.distributed_c10d._get_default_store())
        watch = Watch(store=store, rank=dist.get_rank(), num_ranks=num_ranks, deadline_s=deadline_s)
        where: dict[str, Any] = {"rank": dist.get_rank(), "device": torch.device(device), "hosts": hosts}
        return cls(dp=dp, ep=ep, tp=tp, pp=pp, watch=watch, **where)

    def new_group(self, name: str, members: list[tuple[int, ...]], *, backend: str | None = None) -> Group:
        """This rank's group in a partition of all ranks. All ranks enter, also those that are alone in it."""
        self.partitions[name] = members
        mine = next(ranks for ranks in members if self.rank in ranks)
        options = self._nccl_options() if backend is None else None
        handles = [
            dist.new_group(ranks, backend=backend, pg_options=options) if len(ranks) > 1 else None
            for ranks in members
        ]
        handle, backend = handles[members.index(mine)], ""
        if handle is not None:
            backend = dist.get_backend_config(handle)
            backend = "nccl" if self.device.type == "cuda" and "nccl" in backend else "gloo"
        return Group(name=name, ranks=mine, index=mine.index(self.rank), handle=handle, backend=backend)

    def _nccl_options(self) -> Any:
        """None, or NCCL's options with a bound on its blocks, each of which takes a multiprocessor."""
        if not self.comm_sms or self.device.type != "cuda" or not dist.is_nccl_available():
            return None
        if "nccl" not in dist.get_backend_config():
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = self.comm_sms
        options.config.min_ctas = min(options.config.min_ctas, self.comm_sms)
        return options

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """What all ranks make together and use again, like the groups of a transport."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    def gather_objects(self, value: Any, patience_s: float | None = None) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank; also a barrier."""
        if self.num_ranks == 1:
            return [json.loads(json.dumps(value))]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        mine = torch.tensor([text.numel()], device=self.device)
        sizes = self._all_gather(mine, patience_s).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: text.numel()] = text
        parts = self._all_gather(padded, patience_s).view(self.num_ranks, -1).cpu().numpy()
        return [json.loads(part[:size].tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _all_gather(self, value: torch.Tensor, patience_s: float | None) -> torch.Tensor:
        sent, out = value.repeat(self.num_ranks), value.new_empty(self.num_ranks * value.numel())
        group = self.world

        def start() -> Any:
            return dist.all_to_all_single(out, sent, group=group.handle, async_op=True)

        self.grads.launch(group, "exchange of control data", start, (out, sent)).settle(patience_s)
        return out

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank, numbered by first appearance. Asked once, by all ranks together."""
        return number_hosts(self.gather_objects(host_id()), self.num_ranks)

    def barrier(self) -> None:
        self.gather_objects(None)

    def clock_offset(self) -> tuple[float, float]:
        """(seconds to add to this rank's clock to read rank 0's, error). Zero where all share a host."""
        if len(set(self.hosts)) == 1:
            return 0.0, 0.0
        leaving: list[int] = []
        for _ in range(9):
            self.barrier()
            leaving.append(time.perf_counter_ns())
        stamps = self.gather_objects(leaving)
        offsets = sorted(
            (zero - mine) * 1e-9 for zero, mine in zip(stamps[0], stamps[self.rank], strict=True)
        )
        middle = offsets[len(offsets) // 2]
        return middle, max(offsets[-1] - middle, middle - offsets[0])


def number_hosts(names: Sequence[Any], num_ranks: int) -> tuple[int, ...]:
    """A number for each name, by first appearance."""
    if len(names) != num_ranks:
        raise ConfigError(
            f"hosts names {len(names)} hosts, but there are {num_ranks} ranks; name one for each"
        )
    order = list(dict.fromkeys(names))
    return tuple(order.index(name) for name in names)


def host_id() -> str:
    """Names the clock: containers of one host share it, two hosts never do."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the launcher told this process."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    attempt: int = 0

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Place:
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


def start(
    place: Place,
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


def open_store(place: Place, patience: timedelta) -> dist.Store:
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
