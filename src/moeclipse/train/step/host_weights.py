"""Weights of experts in the host's memory: each layer's visit the device for its forward and backward.

    adopt(layer)       a layer that has just been built: its experts move out
    come(l), gone(l)   around a layer where autograd runs it: they are there; what comes next may leave
    moved(op)          where a pipeline runs its ops one by one
    arrived, updated   around the update of a bucket

Idea. The verified program says which copy stands where (`schedule/weight_travel`). Layers take the buffers of
a ring in turn, so a parameter is always a view of the same bytes of the device, and never replaced: kernels,
saved tensors and buckets need not know that other layers' weights lie there meanwhile. What is read between
steps (checkpoints, digests, `state_dict`) is read on the host, where all of them are.

Outside of a step (evaluation, generation) there is no program: layers come in the order of the model, each
leaves its buffer to the next one that takes it, and behind the last ones the first come back, with which the
next step begins. Who comes in another order waits for its copy.

Contract. Bits are those of weights that stay: they are moved, not changed. The host's memory is taken and
pinned once, when the first layer is built, and a host without room is told before. A device has room for one
layer that is being built beside the ring.

Hazard. Between steps parameters show whatever lies in the ring: read `state_dict`, `Bucket.weights` or a
checkpoint. Copies are launched by Python, layer by layer: no microbatch with them is a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from moeclipse.comm.async_ops.host_lane import Copy, HostLane
from moeclipse.comm.async_ops.ledger import weights_label
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.model.layer import TransformerLayer
from moeclipse.model.lora_config import is_adapter
from moeclipse.model.transformer import Transformer
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST, WEIGHT_COPIES, Form, Kind
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.weight_travel import READERS, LayerPlace, touches, travelling_layers
from moeclipse.train.checkpoints.host_memory import PAGE_BYTES, CudaPins, HostMemory
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.buckets import Bucket, Lent
from moeclipse.train.optim.host_states import ALIGNED, release
from moeclipse.train.optim.parameter_groups import ParameterGroups
from moeclipse.train.optim.state_place import room_for


class Pass(NamedTuple):
    """One that autograd makes through a layer."""

    number: int
    """Of the layer, among those whose weights travel."""
    microbatch: int
    again: bool
    """Its backward, in which it runs again."""


class WeightMove(NamedTuple):
    kind: Kind
    number: int


class HostWeights:
    """Of one rank that has all layers."""

    def __init__(
        self,
        num_layers: int,
        slots: int,
        lane: HostLane,
        device: torch.device,
        room: float,
        is_frozen: Callable[[str], bool],
    ) -> None:
        """`num_layers`: with experts; `slots`: buffers; `room`: bytes of the host that weights may take."""
        self.num_layers, self.slots, self.lane, self.device = num_layers, slots, lane, device
        self._room, self._is_frozen = room, is_frozen
        self._layers: list[int] = []
        """Those that were adopted, by their place in the model."""
        self._memories: dict[str, HostMemory] = {}
        self._ring: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []
        """Of each layer, on the host; what is trained lies in front ..."""
        self._trained: list[int] = []
        """... so many bytes."""
        self._lent: dict[int, tuple[nn.Parameter, Lent]] = {}
        """By the identity of a parameter."""
        self._here: list[int] = []
        """Whose weights each buffer holds, or will when what is under way has come; below 0: nobody's."""
        self._coming: dict[int, Copy] = {}
        self._left: dict[int, tuple[int, Copy]] = {}
        """The last store of each layer, and its number among all: stores end in their order."""
        self._written: dict[int, set[str]] = {}
        """Of layers whose weights are newer on the device: which buckets."""
        self._places: list[LayerPlace] = []
        self._listed: list[Pass | WeightMove] = []
        self._next = 0
        """Of the list; behind its end no step is under way."""
        self._release = weakref.finalize(self, release, lane, self._memories)
        self._release.atexit = False  # a process that ends gives back everything

    # What lies where.

    @property
    def num_bytes(self) -> int:
        """On the host."""
        return sum(held.nbytes for held in self._held)

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._ring)

    @torch.no_grad()
    def adopt(self, layer: TransformerLayer) -> TransformerLayer:
        """Its experts lie on the host from here on; adapters stay."""
        if layer.moe is None:
            return layer
        named = [(key, p) for key, p in layer.moe.experts.named_parameters() if not is_adapter(key)]
        named.sort(key=lambda one: self._is_frozen(f"layers.{layer.index}.moe.experts.{one[0]}"))
        sizes = [-(-parameter.nbytes // ALIGNED) * ALIGNED for _, parameter in named]
        if not self._ring:
            self._take(sum(sizes))
        number = len(self._layers)
        memory, buffer = self._memories[f"{number}"], self._ring[number % self.slots]
        assert sum(sizes) <= buffer.nbytes, "layers with experts differ in size"
        memory.settle()
        offset = trained = 0
        for (key, parameter), size in zip(named, sizes, strict=True):
            there, here = (
                whole[offset : offset + parameter.nbytes].view(parameter.dtype)
                for whole in (memory.data, buffer)
            )
            there.copy_(parameter.data.flatten())
            parameter.data = here.view(parameter.shape)
            self._lent[id(parameter)] = parameter, Lent(number=number, visiting=here, held=there)
            offset += size
            if not self._is_frozen(f"layers.{layer.index}.moe.experts.{key}"):
                trained = offset
        self._layers.append(layer.index)
        self._held.append(memory.data[:offset])
        self._trained.append(trained)
        layer.weights_elsewhere = LayerWeights(self, number)
        return layer

    def _take(self, size: int) -> None:
        """Memory for all layers and the ring, or ConfigError before any of it."""
        if self.num_layers * size > self._room:
            raise ConfigError(
                f"the host has {max(self._room, 0) / 1e9:.3g} GB of memory for this rank, and the weights of "
                f"experts that memory.weights puts there take {self.num_layers * size / 1e9:.3g} GB; set it "
                "to 'device', or keep them in few bits (model.base)"
            )
        pins = CudaPins() if self.device.type == "cuda" else None
        whole = -(-size // PAGE_BYTES) * PAGE_BYTES
        for number in range(self.num_layers):
            self._memories[f"{number}"] = HostMemory(whole, pins, slice_bytes=max(whole, 1))
        # A tensor each: autograd counts changes by the whole of one, and readers mind them.
        self._ring = [torch.empty(whole, dtype=torch.uint8, device=self.device) for _ in range(self.slots)]
        self._here = [-1] * self.slots

    def lent_to(self, parameter: nn.Parameter) -> Lent | None:
        """What a bucket takes instead of memory of its own."""
        found = self._lent.get(id(parameter))
        return None if found is None else found[1]

    def bytes_of(self, layer: int) -> tuple[float, float]:
        """(of a layer's weights on the host, of those that its update writes); by its place in the model."""
        if layer not in self._layers:
            return 0.0, 0.0
        number = self._layers.index(layer)
        return float(self._held[number].nbytes), float(self._trained[number])

    def watch(self, model: Transformer) -> None:
        """Whoever asks for a state gets what lies on the host."""
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        shown = {
            name_of[key]: lent.held.view(parameter.shape) for key, (parameter, lent) in self._lent.items()
        }
        mine = weakref.proxy(self)

        def replaced(_module: object, state: dict[str, object], prefix: str, _metadata: object) -> None:
            mine.settle()
            state.update((prefix + name, there) for name, there in shown.items() if prefix + name in state)

        model.register_state_dict_post_hook(replaced)

    # A step.

    def follow(self, program: Program, *, by_autograd: bool) -> None:
        """A verified program: copies are launched in its order, by autograd's passes or op by op (`run`)."""
        shape, ops = program.pipeline(), program.ranks[0]
        self._places = travelling_layers(shape)
        assert len(self._places) == self.num_layers
        number_of = {place: number for number, place in enumerate(self._places)}
        reading = {touch.position: touch.number for touch in touches(shape, ops) if not touch.writes}
        self._listed, last = [], None
        for position, op in enumerate(ops if by_autograd else ()):
            if op.kind in WEIGHT_COPIES:
                self._listed.append(WeightMove(op.kind, number_of[LayerPlace(op.stage or 0, op.layer or 0)]))
            elif position in reading:
                now = Pass(reading[position], op.microbatch or 0, op.kind.form is not Form.F)
                self._listed += [now] if now != last else []
                last = now
        self._next = len(self._listed)

    def begin_step(self) -> None:
        """As a step begins: the first layers are in the ring, or on their way."""
        for number in sorted(self._written):  # of a step that ended in the middle
            self._store(number)
        for slot in range(self.slots):
            if self._here[slot] != slot:
                self._fetch(slot)
        self._next = 0

    def come(self, number: int, microbatch: int, *, again: bool) -> None:
        """A layer is about to read its weights; `again`: in backward."""
        if self._is_step(again):
            now = self._listed[self._next]
            if now != Pass(number, microbatch, again):
                raise ScheduleError(
                    f"{self._where(number)} reads its weights for microbatch {microbatch}, "
                    f"{'backward' if again else 'forward'}, but the program's next is {now}"
                )
        elif self._here[number % self.slots] != number:
            self._fetch(number)
        self._arrived(number)

    def gone(self, number: int, *, again: bool) -> None:
        """All that reads them has been launched."""
        if self._is_step(again):
            self._next += 1
            while self._next < len(self._listed) and isinstance(now := self._listed[self._next], WeightMove):
                self._launch(now)
                self._next += 1
        elif not again:
            following = number + self.slots
            following = following if following < self.num_layers else number % self.slots
            if self._here[number % self.slots] != following:
                self._fetch(following)

    def _is_step(self, again: bool) -> bool:
        """Backward runs without gradients of its own; so does evaluation, which belongs to no step."""
        return self._next < len(self._listed) and (again or torch.is_grad_enabled())

    def run(self, op: Op) -> bool:
        """Where a pipeline runs its ops one by one: whether this one moves weights, and that was all."""
        if op.stage is None or op.layer is None or (op.kind not in WEIGHT_COPIES and op.kind not in READERS):
            return False
        place = LayerPlace(op.stage, op.layer)
        if place not in self._places:
            return False
        if op.kind in WEIGHT_COPIES:
            self._launch(WeightMove(op.kind, self._places.index(place)))
            return True
        self._arrived(self._places.index(place))
        return False

    def _launch(self, move: WeightMove) -> None:
        if move.kind is kinds.WEIGHTS_FETCH:
            self._fetch(move.number)
        else:
            self._store(move.number)

    def _fetch(self, number: int) -> None:
        slot = number % self.slots
        before = self._here[slot]
        assert before not in self._written, f"{self._where(before)} was updated, and has not been stored"
        self._coming.pop(before, None)
        behind = [self._left[one] for one in (before, number) if one in self._left]
        size = self._held[number].nbytes
        self._coming[number] = self.lane.copy(
            TO_DEVICE,
            weights_label(kinds.WEIGHTS_FETCH, self._where(number)),
            self._ring[slot][:size],
            self._held[number],
            after=max(behind, key=lambda one: one[0])[1] if behind else None,
            behind_compute=True,
        )
        self._here[slot] = number

    def _store(self, number: int) -> None:
        size = self._trained[number]
        done = self._written.pop(number, set())
        if len(done) != self._num_trained(number):
            raise ScheduleError(f"{self._where(number)} is stored, but only {sorted(done)} were updated")
        copy = self.lane.copy(
            TO_HOST,
            weights_label(kinds.WEIGHTS_STORE, self._where(number)),
            self._held[number][:size],
            self._ring[number % self.slots][:size],
        )
        order = max((order for order, _ in self._left.values()), default=-1) + 1
        self._left[number] = order, copy

    def _num_trained(self, number: int) -> int:
        return sum(
            lent.number == number and parameter.requires_grad for parameter, lent in self._lent.values()
        )

    def _arrived(self, number: int) -> None:
        if self._here[number % self.slots] != number:
            raise ScheduleError(f"{self._where(number)} needs its weights, and they were not fetched")
        if number in self._coming:
            self._coming.pop(number).get()

    def _where(self, number: int) -> str:
        return f"layer {self._layers[number]}"

    # Around updates, and between steps.

    def arrived(self, bucket: Bucket) -> None:
        """An update is about to write the weights of this bucket."""
        if bucket.lent is not None:
            self._arrived(bucket.lent.number)

    def updated(self, bucket: Bucket) -> None:
        if bucket.lent is not None:
            self._written.setdefault(bucket.lent.number, set()).add(bucket.name)

    def settle(self) -> None:
        """Wait until all weights are where they lie."""
        for _, copy in self._left.values():
            copy.finish()  # and stays known: what takes its buffer waits for it

    def forget(self) -> None:
        """Somebody writes on the host: what lies in the ring is old."""
        for copy in self._coming.values():
            copy.finish()
        self._coming.clear()
        self._here = [-1] * len(self._here)

    def close(self) -> None:
        """Give the host's memory back, as happens when nobody knows of it any more."""
        self._release()


class LayerWeights:
    """Of one layer, where autograd runs it (`model/layer`)."""

    def __init__(self, weights: HostWeights, number: int) -> None:
        self._weights, self._number = weights, number

    def come(self, microbatch: int, *, again: bool) -> None:
        self._weights.come(self._number, microbatch, again=again)

    def gone(self, *, again: bool) -> None:
        self._weights.gone(self._number, again=again)


def host_weights_of(config: TrainConfig, mesh: Mesh) -> HostWeights:
    """Of a run that has not built its model yet."""
    if mesh.num_ranks > 1:
        raise ConfigError(f"memory.weights = 'host' needs one rank, not {mesh.num_ranks}; set it to 'device'")
    return HostWeights(
        config.num_expert_layers,
        config.memory.buffers,
        HostLane(mesh.device, mesh.recorder, 1e9 * config.memory.copy_gb_s),
        mesh.device,
        room_for(config, mesh),
        ParameterGroups.of(config.optim, config.lora).is_frozen,
    )
