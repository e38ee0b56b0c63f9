"""The collectives of one group on one lane: over torch.distributed, or over peer memory where that applies.

    wire = collectives(mesh, mesh.tensor, mesh.tp_comm, "auto")      # collective; made once, kept by the mesh
    y = wire.all_reduce(x, "all-reduce of outputs, layer 3")          # under way
    ...                                                               # compute that does not need it
    y.get()

Both kinds take the same calls and give the same bits on every rank. Whether a tensor goes over peer memory
depends on its size and dtype alone, which all ranks share, so all ranks choose alike.

How it hides. On a device the reduction is a kernel on the lane's stream, concurrent with compute. On the CPU
there is no wire between ranks of a host, only memory: `launch` copies the input to where peers read it, `get`
reads theirs, and both are this rank's own work. A transfer is therefore recorded as communication only as
long as `get` waits for a peer; what was there already counts as nothing, and is not sold as hidden.

Hazard: tensors must not change between launch and `get`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from moeclipse.comm.async_ops import exchange
from moeclipse.comm.async_ops.lane import Awaited, InFlight, Lane, Then, gather
from moeclipse.comm.async_ops.record import TransferStamps
from moeclipse.comm.async_ops.work import CompletedWork
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.all_reduce import AREA_BYTES, PeerAllReduce
from moeclipse.comm.reduce.begun import BegunReduction
from moeclipse.core.errors import ConfigError

PeerUse = Literal["auto", "on", "off"]
SMALL_BYTES = AREA_BYTES["cpu"]
"""For reductions that many others follow, like those of gradients: what goes through peer memory at once."""


class Collectives:
    """Over torch.distributed."""

    def __init__(self, lane: Lane, group: Group) -> None:
        self.lane, self.group = lane, group

    def gather(self, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        """Every member's `value`, stacked in rank order: shape [P, *value.shape]."""
        return gather(self.lane, self.group, value, label)

    def all_reduce(self, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        """The sum of every member's `value`, which may be overwritten."""
        return exchange.all_reduce(self.lane, self.group, value, label)

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int], label: str) -> InFlight[torch.Tensor]:
        """Sum `flat` over the group; member p gets elements bounds[p]:bounds[p+1]."""
        return exchange.reduce_scatter(self.lane, self.group, flat, bounds, label)

    def all_gather_shards(
        self, flat: torch.Tensor, bounds: Sequence[int], label: str
    ) -> InFlight[torch.Tensor]:
        """Fill `flat` in place with every member's own shard of it."""
        return exchange.all_gather_shards(self.lane, self.group, flat, bounds, label)


class PeerCollectives(Collectives):
    """Over peer memory where it applies, up to `max_bytes`; otherwise over torch.distributed."""

    def __init__(self, lane: Lane, reduce: PeerAllReduce, max_bytes: int | None = None) -> None:
        super().__init__(lane, reduce.group)
        self.reduce, self.max_bytes = reduce, max_bytes
        self._open: InFlight[torch.Tensor] | None = None

    def applies(self, x: torch.Tensor) -> bool:
        if self.max_bytes is not None and x.nbytes > self.max_bytes:
            return False
        return x.numel() > 0 and bool(self.reduce.should_use(x))

    def gather(self, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        out = value.new_empty((self.group.size, *value.shape))
        if not self.applies(out):
            return super().gather(value, label)
        out[self.group.index] = value
        bounds = [rank * value.numel() for rank in range(self.group.size + 1)]
        return Then(self.all_gather_shards(out.view(-1), bounds, label), lambda _: out)

    def all_reduce(self, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        if not self.applies(value):
            return super().all_reduce(value, label)
        if self.lane.device.type == "cpu":
            return self._begin(label, lambda: self.reduce.begin_all_reduce(value, label=label))
        value = value.contiguous()
        return self._on_stream(label, value, lambda: self.reduce.all_reduce(value, out=value, label=label))

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int], label: str) -> InFlight[torch.Tensor]:
        if not self.applies(flat):
            return super().reduce_scatter(flat, bounds, label)
        if self.lane.device.type == "cpu":
            return self._begin(label, lambda: self.reduce.begin_reduce_scatter(flat, bounds, label=label))
        out = flat.new_empty(bounds[self.group.index + 1] - bounds[self.group.index])

        def start() -> None:
            out.copy_(self.reduce.reduce_scatter(flat, bounds, label=label))

        return self._on_stream(label, out, start, flat)

    def all_gather_shards(
        self, flat: torch.Tensor, bounds: Sequence[int], label: str
    ) -> InFlight[torch.Tensor]:
        if not self.applies(flat):
            return super().all_gather_shards(flat, bounds, label)
        if self.lane.device.type == "cpu":
            return self._begin(label, lambda: self.reduce.begin_all_gather(flat, bounds, label=label))
        mine = flat[bounds[self.group.index] : bounds[self.group.index + 1]]

        def start() -> None:
            flat.copy_(self.reduce.all_gather(mine, bounds, label=label))

        return self._on_stream(label, flat, start)

    def _begin(self, label: str, begin: Callable[[], BegunReduction]) -> InFlight[torch.Tensor]:
        if self._open is not None:
            self._open.get()  # one is open at a time; this way its waiting is recorded as its own
        stamps = self.lane.recorder.launch(self.lane.name, self.group.name, label)
        begun = begin()
        self._open = opened = Awaited(begun.value, partial(self._read, begun, stamps))
        return opened

    def _read(self, begun: BegunReduction, stamps: TransferStamps) -> None:
        """From peers' memory, now that it is wanted."""
        if begun.ready:
            begun.get()
            stamps.done = stamps.begun
        else:
            with self.lane.recorder.waiting():
                begun.get()
            stamps.done = time.perf_counter_ns()
        self._open = None

    def _on_stream(
        self, label: str, out: torch.Tensor, run: Callable[[], object], *keep: torch.Tensor
    ) -> InFlight[torch.Tensor]:
        def start() -> CompletedWork:
            run()
            return CompletedWork()

        return self.lane.launch(self.group, label, start, out, keep, on_stream=True)


def collectives(
    mesh: Mesh, group: Group, lane: Lane, peer: PeerUse = "off", *, max_bytes: int | None = None
) -> Collectives:
    """Collective over the group. "auto": peer memory where ranks share it; "on": an error where not."""
    if peer == "off" or group.size == 1:
        return Collectives(lane, group)
    key = f"peer all-reduce {group.name}"
    reduce = mesh.once(key, lambda: PeerAllReduce.open(group, mesh.watch, mesh.device))
    if not reduce.obstacle:
        if mesh.device.type == "cuda" and reduce.algorithm.max_bytes is None:
            max_bytes = None  # ranks of one device, between which NCCL would go through sockets
        key = f"peer collectives {group.name} {lane.name} {max_bytes}"
        return mesh.once(key, lambda: PeerCollectives(lane, reduce, max_bytes))
    if peer == "on":
        raise ConfigError(
            f"parallel.peer = 'on', but ranks {group.ranks} cannot use peer memory: {reduce.obstacle}; "
            "use parallel.peer = 'auto' to go over torch.distributed there"
        )
    return Collectives(lane, group)
