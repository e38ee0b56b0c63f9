"""Optimizer state in the host's memory: it visits the device for its update, through a ring of buffers.

    arrived k    FETCH k has ended: the state, in its buffer                 UPDATE k
    updated k    STORE k is launched, and the FETCH that takes the buffer next

Idea. All tensors of a bucket's state lie one behind the other, on the host as in its buffer: each way is one
copy. The host's pages are pinned where they lie, bucket by bucket by a thread each; a second, pinned copy
to send from would cost the processor as much memory traffic as the wire moves. The buffers are regions of
one ring (`schedule/state_travel`), as the verified program has it, whose ops are launched here one by one, in
its order.

Contract. Bits are those of state that stays on the device: the same kernels read the same bytes. The last
ways back of a step go on while the next one computes; who saves, loads or compares waits for them first
(`settle`, which `AdamW.states` asks for), and reads the host's memory directly.
A host that has too little memory is told before any of it is taken.

Hazard. Memory that other programs take later is not foreseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moeclipse.comm.async_ops.host_lane import Copy, HostLane
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import STATE_COPIES, TO_DEVICE, TO_HOST
from moeclipse.schedule.op import Op
from moeclipse.schedule.state_travel import Region, last_in, ring
from moeclipse.train.checkpoints.host_memory import CudaPins, HostMemory
from moeclipse.train.optim.buckets import Bucket
from moeclipse.train.optim.memory_config import MemoryConfig
from moeclipse.train.optim.optim_config import OptimConfig
from moeclipse.train.optim.shard_state import STATES, ShardState

ALIGNED = 256
KINDS = {"all": STATES, "moments": STATES[1:], "master": STATES[:1]}
"""What each value of `memory.states` names."""


class LiesOnHost(Protocol):
    """What lies in the host's memory, and travels over a lane."""

    lane: HostLane

    @property
    def num_bytes(self) -> int: ...


@dataclass(kw_only=True)
class Traveller:
    """A bucket whose state lies on the host."""

    name: str
    memory: HostMemory
    held: torch.Tensor
    """Its bytes there ..."""
    buffer: torch.Tensor
    """... and where they visit."""
    behind: str
    """Whose store leaves that free: of the same step, or else of the one before."""
    visiting: ShardState
    came: Copy | None = None


class HostStates:
    """Of one rank."""

    def __init__(
        self, lane: HostLane, config: MemoryConfig, travelling: Collection[str], room: float
    ) -> None:
        """`travelling`: names of buckets; `room`: bytes of the host's memory that this rank may take."""
        self.lane, self.kinds, self.slots = lane, KINDS[config.states], config.buffers
        self.names, self.room = set(travelling), room
        self.travellers: dict[str, Traveller] = {}
        self._memories: dict[str, HostMemory] = {}
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._regions: dict[str, tuple[Region, str]] = {}
        """By name of bucket; and behind whose store it is free."""
        self._left: dict[str, Copy] = {}
        """The last store of each bucket."""
        self._ops: list[tuple[Op, str]] = []
        self._next = 0
        self._release = weakref.finalize(self, release, lane, self._memories)
        self._release.atexit = False  # a process that ends gives back everything

    @property
    def num_bytes(self) -> int:
        """On the host."""
        return sum(traveller.held.nbytes for traveller in self.travellers.values())

    @property
    def buffer_bytes(self) -> int:
        return self._ring.nbytes

    def prepare(self, buckets: Sequence[Bucket], config: OptimConfig) -> None:
        """Take memory for the state of all buckets that travel; pages come while the rest is built.

        `buckets`: in the order of their updates.
        """
        sizes: dict[str, int] = {}
        for bucket in buckets:
            if bucket.name in self.names:
                size = total_bytes(self._tensors(ShardState.of(bucket, config)))
                sizes[bucket.name], bucket.host_bytes = size, max(float(size), 1.0)
        needed = sum(sizes.values())
        if needed > self.room:
            share = int(100 * self.room / needed) / 100
            raise ConfigError(
                f"the host has {self.room / 1e9:.3g} GB of memory for this rank, and the optimizer state "
                f"that memory.place puts there takes {needed / 1e9:.3g} GB; set memory.share to {share:g} at "
                "most, or see optim.state and optim.master"
            )
        device = next(iter(buckets)).params.device
        pins = CudaPins() if device.type == "cuda" else None
        for name, size in sizes.items():
            self._memories[name] = HostMemory(size, pins, slice_bytes=max(size, 1))
        names, regions = list(sizes), ring(list(sizes.values()), self.slots)
        for name, region in zip(names, regions, strict=True):
            before = last_in(regions, region) if region.before < 0 else region.before
            self._regions[name] = region, names[before]
        room = int(max((region.stop for region in regions), default=0))
        self._ring = torch.empty(room, dtype=torch.uint8, device=device)

    def take(self, bucket: Bucket, config: OptimConfig) -> ShardState:
        """A bucket's state as it begins: on the host if it travels."""
        state = ShardState.of(bucket, config)
        if bucket.name not in self._memories:
            return state
        memory, tensors = self._memories[bucket.name], self._tensors(state)
        memory.settle()
        size = total_bytes(tensors)
        region, behind = self._regions[bucket.name]
        held, buffer = memory.data[:size], self._ring[int(region.start) : int(region.start) + size]
        there, here = laid_out(tensors, held), laid_out(tensors, buffer)
        for name, tensor in tensors.items():
            there[name].copy_(tensor)
        self.travellers[bucket.name] = Traveller(
            name=bucket.name,
            memory=memory,
            held=held,
            buffer=buffer,
            behind=behind,
            visiting=state.rebuilt(here),
        )
        found = tuple(kind for kind in self.kinds if state.tensors_of(kind))
        return state.rebuilt(there, found)

    def _tensors(self, state: ShardState) -> dict[str, torch.Tensor]:
        return {name: tensor for kind in self.kinds for name, tensor in state.tensors_of(kind).items()}

    def follow(self, ops: Sequence[Op], buckets: Sequence[Bucket]) -> None:
        """The list of this rank, of a verified program: copies are launched in its order."""
        known = (*STATE_COPIES, kinds.BUCKET_UPDATE)
        listed = [(op, buckets[op.step or 0].name) for op in ops if op.kind in known]
        ours = [(op, name) for op, name in listed if name in self.travellers]
        # What is fetched behind the last update is there for the first one of the next step.
        last = max((at for at, (op, _) in enumerate(ours) if op.kind is not kinds.BUCKET_FETCH), default=-1)
        self._ops = ours[last + 1 :] + ours[: last + 1]
        self._next = len(self._ops)

    def begin_step(self) -> None:
        """What the program fetches ahead is under way from here on; asked again, nothing happens."""
        if self._next == len(self._ops):
            self._next = 0
            self._launch()

    def arrived(self, bucket: Bucket) -> ShardState | None:
        """A bucket's state on the device, for its update; None: it does not travel."""
        traveller = self.travellers.get(bucket.name)
        if traveller is None:
            return None
        op, name = self._ops[self._next] if self._next < len(self._ops) else (None, "nothing")
        if name != bucket.name or traveller.came is None:
            raise ScheduleError(f"bucket {bucket.name} is updated, but the program's next is {op} of {name}")
        traveller.came.get()
        traveller.came = None
        return traveller.visiting

    def updated(self, bucket: Bucket) -> None:
        """Its way back, and what takes its buffer next."""
        if bucket.name in self.travellers:
            self._next += 1
            self._launch()

    def _launch(self) -> None:
        """Copies up to the next update."""
        while self._next < len(self._ops) and self._ops[self._next][0].kind in STATE_COPIES:
            op, name = self._ops[self._next]
            one = self.travellers[name]
            if op.kind is kinds.BUCKET_STORE:
                label = f"store of state, bucket {name}"
                self._left[name] = self.lane.copy(TO_HOST, label, one.held, one.buffer)
            else:
                label, before = f"fetch of state, bucket {name}", self._left.get(one.behind)
                one.came = self.lane.copy(TO_DEVICE, label, one.buffer, one.held, after=before)
            self._next += 1

    def forget(self) -> None:
        """What was fetched ahead is another's: somebody writes where it lies. It is fetched again."""
        if not any(op.kind is kinds.BUCKET_UPDATE for op, _ in self._ops[: self._next]):
            for traveller in self.travellers.values():
                if traveller.came is not None:
                    traveller.came.finish()
                    traveller.came = None
            self._next = len(self._ops)

    def settle(self) -> None:
        """Behind the last update of a step: wait until all state is where it lies."""
        for left in self._left.values():
            left.finish()  # and stays known: the next fetch into its buffer waits for it

    def close(self) -> None:
        """Give the host's memory back, as happens when nobody knows of it any more."""
        self._release()


def release(lane: HostLane, memories: dict[str, HostMemory]) -> None:
    lane.close()
    for memory in memories.values():
        memory.close()


def total_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors.values())


def laid_out(tensors: dict[str, torch.Tensor], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of the same types and lengths, one behind the other in `memory`."""
    found, offset = dict[str, torch.Tensor](), 0
    for name, tensor in tensors.items():
        found[name] = memory[offset : offset + tensor.nbytes].view(tensor.dtype)
        offset += -(-tensor.nbytes // ALIGNED) * ALIGNED
    return found
