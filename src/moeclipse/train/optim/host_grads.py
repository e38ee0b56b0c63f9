"""Gradients in the host's memory, from the backward of their layer to its update under the next forward.

    reduced k     squares for the norm, and STORE k where another layer needs the memory
    make_room     in front of a layer's backward, which writes there: what lay there has left
    arrived k     FETCH k has ended: the gradient lies where backward left it, for UPDATE k
    updated k     FETCH of the gradient that lay in this memory before

Idea. Layers take few buffers for gradients in turn (`train/optim/buckets`). The last ones of backward keep
theirs, and are updated first; each update makes room for the next gradient, in the order of the next forward
(`schedule/grad_travel`, whose verified program says which travel).

Contract. Bits are those of gradients that stay in such buckets: they are moved, not changed, and the norm
adds the same squares in the same order. The host's memory is taken and pinned once; a host without room is
told before.

Hazard. Behind backward a bucket's `grads` hold its own gradient only once it has `arrived`: a step that is
not finite is skipped, and not looked at again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from moeclipse.comm.async_ops.host_lane import Copy, HostLane
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.model.transformer import Transformer
from moeclipse.ops.adam import squares
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST
from moeclipse.schedule.op import Op
from moeclipse.train.checkpoints.host_memory import CudaPins, HostMemory
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.adamw import AdamW
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.optim.host_states import ALIGNED, LiesOnHost, release
from moeclipse.train.optim.state_place import room_for


class HostGrads:
    """Of one rank that has all layers."""

    def __init__(self, buckets: Buckets, ops: Sequence[Op], lane: HostLane, room: float) -> None:
        """`ops`: of a verified program; `room`: bytes of the host's memory that they may take."""
        self.buckets, self.lane = buckets.buckets, lane
        self.shards: list[torch.Tensor] = []
        """Of the step: views of memory that layers share."""
        self._squares: list[torch.Tensor] = []
        self._leave = {op.step or 0 for op in ops if op.kind is kinds.GRAD_STORE}
        if not self._leave:
            raise ConfigError(
                "memory.main_grad = 'host' moves nothing: no two layers that are alike share memory for "
                "gradients; set it to 'device', or lower memory.buffers"
            )
        self._behind: dict[int, list[int]] = {}
        """By the update that makes room: whose gradients come back."""
        updated = -1
        for op in ops:
            if op.kind is kinds.BUCKET_UPDATE:
                updated = op.step or 0
            elif op.kind is kinds.GRAD_FETCH:
                self._behind.setdefault(updated, []).append(op.step or 0)
        sizes = {number: self.buckets[number].grads.nbytes for number in sorted(self._leave)}
        self.num_bytes = sum(-(-size // ALIGNED) * ALIGNED for size in sizes.values())
        if self.num_bytes > room:
            raise ConfigError(
                f"the host has {max(room, 0) / 1e9:.3g} GB of memory for this rank, and the gradients that "
                f"memory.main_grad puts there take {self.num_bytes / 1e9:.3g} GB beside the state there; "
                "set it to 'device', or optim.main_grad to 'bf16'"
            )
        pins = CudaPins() if self.buckets[0].grads.is_cuda else None
        self.memory = HostMemory(self.num_bytes, pins)
        self._held: dict[int, torch.Tensor] = {}
        offset = 0
        for number, size in sizes.items():
            grads = self.buckets[number].grads
            self._held[number] = self.memory.data[offset : offset + size].view(grads.dtype)
            offset += -(-size // ALIGNED) * ALIGNED
        self._left: dict[int, Copy] = {}
        self._came: dict[int, Copy] = {}
        self._release = weakref.finalize(self, release, lane, {"gradients": self.memory})
        self._release.atexit = False  # a process that ends gives back everything
        buckets.on_reduce = self._reduced

    def watch(self, model: Transformer) -> None:
        """From here on backward of a layer waits for the memory that its gradients take."""
        for number, layer in enumerate(model.all_layers):
            name = f"layers.{number}"
            before = [bucket.waits_for for bucket in self.buckets if bucket.layer_name == name]
            taken = [self.buckets.index(bucket) for bucket in before if bucket is not None]
            if taken:
                layer.register_forward_hook(_Watch(self, taken))

    def _reduced(self, number: int) -> None:
        if not number:
            self.memory.settle()
            self.shards, self._squares = [], []
            self._left.clear()  # all updates of the step before have run, or are not taken
        bucket = self.buckets[number]
        shard = bucket.reduced()
        self.shards.append(shard)
        if bucket.owned:
            self._squares.append(squares([shard]))
        if number in self._leave:
            label = f"store of gradient, bucket {bucket.name}"
            self._left[number] = self.lane.copy(TO_HOST, label, self._held[number], shard)

    def make_room(self, taken: Sequence[int]) -> None:
        """Gradients of a layer are about to be written where these lay."""
        for number in taken:
            if number not in self._left:
                raise ScheduleError(
                    f"a gradient takes the memory of {self.buckets[number].name}, which has not left it"
                )
            self._left[number].get()

    def sum_of_squares(self, _shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of all gradients of the step, as `AdamW` adds them."""
        return torch.cat(self._squares).sum()

    def arrived(self, number: int) -> None:
        """The gradient of this bucket is read from here on."""
        if number in self._leave:
            if number not in self._came:
                raise ScheduleError(f"bucket {self.buckets[number].name} is updated, and its gradient away")
            self._came.pop(number).get()

    def updated(self, number: int) -> None:
        """Its gradient has been read."""
        for other in self._behind.get(number, ()):
            bucket = self.buckets[other]
            label = f"fetch of gradient, bucket {bucket.name}"
            self._came[other] = self.lane.copy(
                TO_DEVICE,
                label,
                bucket.grads,
                self._held[other],
                after=self._left[other],
                behind_compute=True,
            )

    def close(self) -> None:
        """Give the host's memory back, as happens when nobody knows of it any more."""
        self._release()


class _Watch:
    """Of one layer: when the gradient of its output comes."""

    def __init__(self, grads: HostGrads, taken: Sequence[int]) -> None:
        self._grads, self._taken = weakref.proxy(grads), taken

    def __call__(self, _module: object, _args: object, out: tuple[torch.Tensor, object]) -> None:
        if out[0].requires_grad:
            out[0].register_hook(lambda _: self._grads.make_room(self._taken))


def host_grads_of(
    config: TrainConfig,
    mesh: Mesh,
    optim: AdamW,
    model: Transformer,
    ops: Sequence[Op],
    others: Sequence[LiesOnHost],
) -> HostGrads:
    """Of a run; beside what else lies on the host, and over the same lane."""
    lane = others[0].lane if others else HostLane(mesh.device, mesh.recorder, 1e9 * config.memory.copy_gb_s)
    room = room_for(config, mesh, sum(other.num_bytes for other in others))
    found = HostGrads(optim.buckets, ops, lane, room)
    found.watch(model)
    return found
