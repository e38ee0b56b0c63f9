"""Ranks, their axes and groups.

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

Where two copies of the model run in opposite directions (`mirrored`), places p and pp - 1 - p hold the same
layers: those who share parameters (dense_grads, cut_grads, replicas, expert_grads) are those of both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moeclipse.comm.async_ops.lane import Lane
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.async_ops.work import Waitable
from moeclipse.comm.connect import connect_group
from moeclipse.comm.failure import Watch
from moeclipse.comm.gather_json import tell
from moeclipse.comm.group import Group, host_id, number_hosts
from moeclipse.comm.private_torch import default_store
from moeclipse.comm.start import shared_secret
from moeclipse.core.errors import CommError, ConfigError

Made = TypeVar("Made")


AXES = ("pp", "dp", "ep", "tp")
"""Of a mesh, the slowest first."""
KEPT_AS = "moeclipse_mesh"
"""Where a DeviceMesh keeps what was made of it: groups are made once."""


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
        hosts: Sequence[object] | None = None,
        comm_sms: int = 0,
        mirrored: bool = False,
    ) -> None:
        """`hosts` names the host of each rank, alike on all ranks; left out, the machines are asked.

        `comm_sms` bounds the multiprocessors that NCCL's kernels take; 0: NCCL decides.
        """
        self.comm_sms = comm_sms
        self.dp, self.ep, self.tp, self.pp = dp, ep, tp, pp
        self.mirrored = mirrored
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
        columns = [both[e::block] for both in self._sharing() for e in range(block)]
        self.world = self.new_group("world", [tuple(range(self.num_ranks))])
        self.stage = self.world if self.pp == 1 else self.new_group("stage", stages)
        self.experts = self.new_group("experts", rows)
        # Gradient reductions run beside everything else, so they have communicators of their own.
        self.dense_grads = self.new_group("dense_grads", self._sharing())
        self.replicas = self.new_group("replicas", columns)
        self.data, self.cut_grads, self.shard_experts = self.stage, self.dense_grads, self.experts
        blocks = [tuple(range(k, k + tp)) for k in range(0, self.num_ranks, tp)]
        self.tensor = self.new_group("tensor", blocks)
        if tp > 1:
            strides = [stage[t::tp] for stage in stages for t in range(tp)]
            self.data = self.new_group("data", strides)
            cut = [both[t::tp] for both in self._sharing() for t in range(tp)]
            self.cut_grads = self.new_group("cut_grads", cut)
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

    def _sharing(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same layers: a stage, or two."""
        size = self.num_ranks // self.pp
        stages = [tuple(range(first, first + size)) for first in range(0, self.num_ranks, size)]
        if not self.mirrored:
            return stages
        return [stages[place] + stages[-1 - place] for place in range(self.pp // 2)]

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

    def expert_grads(self) -> Group:
        """Those that hold the same experts, whatever part of them: dp x tp ranks; collective."""
        members: list[tuple[int, ...]] = [
            tuple(rank for rank in both if rank // self.tp % self.ep == e)
            for both in self._sharing()
            for e in range(self.ep)
        ]
        return self.once("expert_grads", lambda: self.new_group("expert_grads", members))

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
        hosts: Sequence[object] | None = None,
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
        store = dist.PrefixStore("moeclipse", default_store())
        watch = Watch(
            store=store,
            rank=dist.get_rank(),
            num_ranks=num_ranks,
            deadline_s=deadline_s,
            secret=shared_secret(torch.device(device)),
        )
        where: dict[str, Any] = {"rank": dist.get_rank(), "device": torch.device(device), "hosts": hosts}
        return cls(dp=dp, ep=ep, tp=tp, pp=pp, watch=watch, **where)

    @classmethod
    def of_device_mesh(cls, mesh: DeviceMesh) -> Mesh:
        """The same ranks as a torch DeviceMesh of all ranks; its axes are pp, dp, ep, tp, in this order.

        Any of them may be missing, and one axis without a name is ep. Collective; made once for each.
        """
        known: Mesh | None = vars(mesh).get(KEPT_AS)
        if known is not None:
            return known
        names = mesh.mesh_dim_names or (("ep",) if mesh.ndim == 1 else ())
        sizes = dict(zip(names, mesh.mesh.shape, strict=False))
        in_order = [name for name in AXES if name in sizes]
        every_rank = torch.arange(mesh.mesh.numel()).view(mesh.mesh.shape)
        if len(names) != mesh.ndim or list(names) != in_order or not torch.equal(mesh.mesh.cpu(), every_rank):
            raise ConfigError(
                f"the DeviceMesh has axes {list(names) or 'without names'} of sizes {list(mesh.mesh.shape)}; "
                f"name them {', '.join(AXES)}, in this order, any of them, over all ranks in rank order: "
                "init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'ep'))"
            )
        device = torch.device(mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        dp, ep, tp, pp = (int(sizes.get(name, 1)) for name in ("dp", "ep", "tp", "pp"))
        made = cls.of_world(dp=dp, ep=ep, tp=tp, pp=pp, device=device)
        vars(mesh)[KEPT_AS] = made
        return made

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
        assert not isinstance(handle, int), "this rank is a member"
        if handle is not None:
            backend = dist.get_backend_config(handle)
            backend = "nccl" if self.device.type == "cuda" and "nccl" in backend else "gloo"
        group = Group(name=name, ranks=mine, index=mine.index(self.rank), handle=handle, backend=backend)
        connect_group(self.grads, group)
        return group

    def _nccl_options(self) -> object:
        """None, or NCCL's options with a bound on its blocks, each of which takes a multiprocessor."""
        if not self.comm_sms or self.device.type != "cuda" or not dist.is_nccl_available():
            return None
        if "nccl" not in dist.get_backend_config():
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = self.comm_sms
        options.config.min_ctas = min(options.config.min_ctas, self.comm_sms)
        return options

    def lane(self, name: str) -> Lane:
        """Made once: a device has few streams, and a lane that shares one waits for what it does not need."""
        return self.once(f"lane {name}", lambda: Lane(name, self.device, self.recorder, self.watch))

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """What all ranks make together and use again, like the groups of a transport."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    def gather_objects(self, value: Made, patience_s: float | None = None) -> list[Made]:
        """Every rank's JSON value, in rank order, on every rank; also a barrier."""
        if self.num_ranks == 1:
            return [json.loads(json.dumps(value))]
        return tell(value, self.device, lambda mine: self._all_gather(mine, patience_s))

    def _all_gather(self, value: torch.Tensor, patience_s: float | None) -> torch.Tensor:
        sent, out = value.repeat(self.num_ranks), value.new_empty(self.num_ranks * value.numel())
        group = self.world

        def start() -> Waitable | None:
            return dist.all_to_all_single(out, sent, group=group.handle, async_op=True)

        everyone = self.grads.launch(group, "exchange of control data", start, out, sent).settle(patience_s)
        return everyone.view(self.num_ranks, -1)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank, numbered by first appearance. Asked once, by all ranks together."""
        return number_hosts(self.gather_objects(host_id()), self.num_ranks)

    @property
    def ranks_here(self) -> int:
        """Ranks on this rank's host, itself included. Collective as `hosts` is."""
        return self.hosts.count(self.hosts[self.rank])

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
