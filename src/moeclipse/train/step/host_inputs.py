"""Inputs of layers that run again, in the host's memory between forward and backward.

    make_room()      before a layer: what waits for its way out is no more than there is room for
    store(key, x)    its input leaves; whoever calls forgets it
    fetch(key)       back, to a buffer of the ring
    arrived(key)     the same values, for as long as the layer's backward takes

Idea. The verified program says all (`schedule/input_travel`): which buffer and which place on the host each
input takes, and when it travels. A pipeline runs its ops one by one (`pipeline/runtime`); autograd comes to
layers and leaves them instead (`LayerInput`), and what the program has there is launched.

Contract. Bits are those of inputs that stay: they are moved, not changed. The host's memory is taken and
pinned once; a host without room is told before. A step that ended in the middle leaves nothing behind:
`begin_step` waits for what is under way and forgets it.

Hazard. Copies are launched by Python, layer by layer: no microbatch with them is a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch

from moeclipse.comm.async_ops.host_lane import Copy, HostLane
from moeclipse.comm.async_ops.ledger import input_label
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.model.transformer import Transformer
from moeclipse.schedule import kinds
from moeclipse.schedule.input_travel import InputKey, host_regions, ring_buffers, travels
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST, Kind
from moeclipse.schedule.op import Program
from moeclipse.train.checkpoints.host_memory import PAGE_BYTES, CudaPins, HostMemory
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.host_states import LiesOnHost, release
from moeclipse.train.optim.state_place import room_for


class HostInputs:
    """Of one rank."""

    def __init__(self, program: Program, mesh: Mesh, lane: HostLane, *, room: float) -> None:
        """`room`: bytes of the host's memory that they may take."""
        shape, ops, device = program.pipeline(), program.ranks[mesh.pp_index], mesh.device
        assert shape.step is not None
        self.lane, self.slots = lane, shape.step.input_slots
        moved = (kinds.INPUT_STORE, kinds.INPUT_FETCH, kinds.ATTN_W)
        self._moved = [op for op in ops if op.kind in moved and travels(shape, op)]
        self._next = 0
        self._first_layers = shape.first_layers
        self._regions = host_regions(shape, ops)
        self._buffer_of = ring_buffers(ops, self.slots)
        largest = int(max(layer.host_bytes for stage in shape.layers for layer in stage))
        self._each = -(-largest // PAGE_BYTES) * PAGE_BYTES
        if not largest:
            raise ConfigError(
                "memory.activations = 'host' moves nothing: no layer between the first that has something to "
                "train and the last; set it to 'device'"
            )
        if self.num_bytes > room:
            raise ConfigError(
                f"the host has {max(room, 0) / 1e9:.3g} GB of memory for this rank, and the inputs of layers "
                f"that memory.activations puts there take {self.num_bytes / 1e9:.3g} GB beside "
                "the state there; set it to 'device', or lower data.batch_size"
            )
        pins = CudaPins() if device.type == "cuda" else None
        self.memory = HostMemory(self.num_bytes, pins, slice_bytes=self._each)
        # A tensor each: autograd counts changes by the whole of one, and readers mind them.
        self._ring = [torch.empty(self._each, dtype=torch.uint8, device=device) for _ in range(self.slots)]
        self._leaving: deque[tuple[Copy, torch.Tensor]] = deque()
        """With the memory that they leave."""
        self._stored: dict[InputKey, tuple[Copy, torch.Tensor]] = {}
        """On the host; the tensor there is like the one that left."""
        self._coming: dict[InputKey, tuple[Copy, torch.Tensor]] = {}
        self._release = weakref.finalize(self, release, lane, {"inputs": self.memory})
        self._release.atexit = False  # a process that ends gives back everything

    @property
    def num_bytes(self) -> int:
        """On the host."""
        return self._regions.count * self._each

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._ring)

    def begin_step(self) -> None:
        """Nothing is under way, as behind a step that ended; behind one that did not it is forgotten."""
        self.memory.settle()
        self._next = 0
        for copy, _ in (*self._leaving, *self._stored.values(), *self._coming.values()):
            if self._stored or self._coming:
                with suppress(Exception):  # whoever asked for it has been told
                    copy.finish()
        self._leaving.clear()
        self._stored.clear()
        self._coming.clear()

    def make_room(self) -> None:
        while len(self._leaving) >= self.slots:
            copy, _ = self._leaving[0]
            copy.get()
            self._leaving.popleft()  # behind the wait: what takes this memory next comes behind the copy

    def store(self, key: InputKey, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: the chunks of a microbatch."""
        self.make_room()
        rows = parts[0].detach().contiguous() if len(parts) == 1 else torch.cat(list(parts)).detach()
        assert rows.nbytes <= self._each, f"{self._where(key)}: more tokens than the program says"
        region = self._regions.of[key] * self._each
        held = self.memory.data[region : region + rows.nbytes].view(rows.dtype).view(rows.shape)
        copy = self.lane.copy(TO_HOST, input_label(kinds.INPUT_STORE, self._where(key)), held, rows)
        self._leaving.append((copy, rows))
        self._stored[key] = copy, held

    def fetch(self, key: InputKey) -> None:
        left, held = self._stored.pop(key)
        whole = self._ring[self._buffer_of[key]]
        buffer = whole[: held.nbytes].view(held.dtype).view(held.shape)
        label = input_label(kinds.INPUT_FETCH, self._where(key))
        self._coming[key] = (
            self.lane.copy(TO_DEVICE, label, buffer, held, after=left, behind_compute=True),
            buffer,
        )

    def arrived(self, key: InputKey) -> torch.Tensor:
        if key not in self._coming:
            raise ScheduleError(f"the input of {self._where(key)} is read, but was not fetched")
        copy, buffer = self._coming.pop(key)
        copy.get()
        return buffer

    def _where(self, key: InputKey) -> str:
        return f"layer {self._first_layers[key.stage] + key.layer}, microbatch {key.microbatch}"

    # Where autograd runs layers.

    def watch(self, model: Transformer) -> None:
        """From here on layers of this model keep their inputs on the host."""
        for layer in sorted({op.layer for op in self._moved if op.layer is not None}):
            model.layer(layer).input_elsewhere = LayerInput(self, layer)

    def entered(self, key: InputKey, x: torch.Tensor) -> None:
        """A layer is about to run forward."""
        self._pass(kinds.INPUT_STORE, key)
        self.store(key, [x])
        self._fetch_next()

    def left(self, key: InputKey) -> None:
        """Its backward has been launched."""
        self._pass(kinds.ATTN_W, key)
        self._fetch_next()

    def _pass(self, kind: Kind, key: InputKey) -> None:
        op = self._moved[self._next] if self._next < len(self._moved) else None
        if op is None or op.kind is not kind or InputKey.of(op) != key:
            raise ScheduleError(f"{kind} of {self._where(key)} is not the program's next, which is {op}")
        self._next += 1

    def _fetch_next(self) -> None:
        while self._next < len(self._moved) and self._moved[self._next].kind is kinds.INPUT_FETCH:
            self.fetch(InputKey.of(self._moved[self._next]))
            self._next += 1

    def close(self) -> None:
        """Give the host's memory back, as happens when nobody knows of it any more."""
        self._release()


class LayerInput:
    """The input of one layer, where autograd runs it (`model/recompute`)."""

    def __init__(self, inputs: HostInputs, layer: int) -> None:
        self._inputs, self._layer = inputs, layer

    def leave(self, x: torch.Tensor, microbatch: int) -> None:
        self._inputs.entered(InputKey(0, self._layer, microbatch), x)

    def back(self, microbatch: int) -> torch.Tensor:
        return self._inputs.arrived(InputKey(0, self._layer, microbatch))

    def done(self, microbatch: int) -> None:
        self._inputs.left(InputKey(0, self._layer, microbatch))


def host_inputs_of(
    config: TrainConfig, mesh: Mesh, program: Program, others: Sequence[LiesOnHost]
) -> HostInputs:
    """Of a run; beside what else lies on the host, and over the same lane."""
    lane = others[0].lane if others else HostLane(mesh.device, mesh.recorder, 1e9 * config.memory.copy_gb_s)
    room = room_for(config, mesh, sum(other.num_bytes for other in others))
    return HostInputs(program, mesh, lane, room=room)
