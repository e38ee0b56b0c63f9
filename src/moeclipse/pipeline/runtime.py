"""Binds a verified program to the stages of a rank and runs it, op by op, on `comm/async_ops/execute`.

    runtime = Runtime(verified, mesh, stages, wgrads, width=d_model, dtype=dtype)
    runtime.step(feed, scale)          # feed(m, chunk, chunks): what the model needs of a microbatch

Nothing runs that the verifier has not seen. A program that cuts a microbatch into chunks cuts it on all
stages and in both directions: its chunks are passes of their own, and an op without a chunk runs all of them.

Activations travel forward and gradients back through `mesh.pipe`, one communicator for each direction of
each, so that a posted receive never blocks a send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from moeclipse.comm.async_ops.execute import execute, execute_settled
from moeclipse.comm.async_ops.lane import InFlight, Joined, poll
from moeclipse.comm.connect import WireEnds, connect_wires
from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline.backward import Deferral, Segment
from moeclipse.pipeline.stage import Stage, Where, begin
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.schedule.input_travel import InputKey, travels
from moeclipse.schedule.kinds import COPIES, ENDS, LAUNCHES, TRANSFERS, Form, Kind, Part
from moeclipse.schedule.op import Op
from moeclipse.tensor.weight_grad import WeightGrads


class Fed(Protocol):
    """What `feed` returns; the rest of it is between the caller and its model."""

    @property
    def rows(self) -> int:
        """Rows of activations that this rank has of the chunk."""
        ...


class TravellingInputs(Protocol):
    """Moves inputs of layers to the host and back (`train/step/host_inputs`)."""

    def make_room(self) -> None: ...
    def store(self, key: InputKey, parts: Sequence[torch.Tensor], /) -> None: ...
    def fetch(self, key: InputKey, /) -> None: ...
    def arrived(self, key: InputKey, /) -> torch.Tensor: ...


class VisitingWeights(Protocol):
    """Moves weights of experts to the device and back (`train/step/host_weights`)."""

    def run(self, op: Op, /) -> bool:
        """What an op means for them, in front of its own work; True: that was all."""
        ...


Feed = Callable[[int, int, int], Fed]
Carried = TypeVar("Carried")


class At(NamedTuple):
    """Where a layer op belongs."""

    stage: int
    layer: int
    microbatch: int

    @classmethod
    def of(cls, op: Op) -> At:
        return cls(op.stage or 0, op.layer or 0, op.microbatch or 0)


@dataclass(kw_only=True)
class StagePass:
    """One chunk of a microbatch in one stage."""

    microbatch: Fed
    layers: list[Any] = field(default_factory=list)
    """A LayerPass each, and in the end a Finished."""
    embedded: Segment | None = None
    head: Segment | None = None
    ready: set[int] = field(default_factory=set)
    """Layers that have the gradient of their output."""
    d_out: torch.Tensor | None = None
    """Gradient of the last layer's output, from the head, until that layer takes it."""
    num_finished: int = 0


class Finished:
    """What is left of a layer that has run its last op: a gradient, until somebody takes it."""

    def __init__(self, d_in: torch.Tensor | None) -> None:
        self._d_in = d_in

    def gradient(self) -> torch.Tensor | None:
        d_in, self._d_in = self._d_in, None
        return d_in


class Runtime:
    def __init__(
        self,
        verified: Verified,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        wgrads: WeightGrads,
        *,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """`stages`: those of this rank, by number."""
        self.verified, self.mesh, self.stages, self.wgrads = verified, mesh, stages, wgrads
        self.width, self.dtype = width, dtype
        self.shape = verified.program.pipeline()
        self.ops = verified.program.ranks[mesh.pp_index]
        self.chunks = cuts_of(verified)
        connect_wires(mesh.grads, self._wires())
        self.settles = mesh.line.backend == "nccl"
        """The next step finishes each op before the next: slow, and safe while kernels are loaded."""
        self._order = verified.proved_order(mesh.pp_index) if self.settles else None
        own = (op for op in self.ops if op.layer is not None and op.kind not in (*LAUNCHES, *COPIES))
        self._uses = Counter(map(At.of, own))
        self.ends: Mapping[Kind, Callable[[Op], None]] = {}
        """What ops of no layer do, reductions of buckets for one; others are left to who runs the step."""
        self.observe: Callable[[Op, Any, Any], None] | None = None
        """Called with each op and the stamps around it, waiting excluded."""
        self.inputs: TravellingInputs | None = None
        """Where the program has inputs of layers leave and come back."""
        self.weights: VisitingWeights | None = None
        """Where it has weights come, and leave."""

    def step(self, feed: Feed, scale: torch.Tensor) -> None:
        """All microbatches, forward and backward; `scale` is the gradient of each loss."""
        self._feed, self._scale = feed, scale
        self._passes: dict[tuple[int, int], list[StagePass]] = {}
        self._left = Counter(self._uses)
        self._received: dict[tuple[Form, int, int], InFlight[torch.Tensor]] = {}
        self._handed: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._sent: dict[tuple[int, int], InFlight[None]] = {}
        with torch.no_grad():
            if self.settles:
                execute_settled(self.verified, self.mesh.pp_index, self._op, self._settle)
                self.settles = False
            else:
                execute(self.verified, self.mesh.pp_index, self._op, self._order)

    def _settle(self, what: str) -> None:
        if self.mesh.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            watch = self.mesh.watch
            poll(event, watch, f"{what} of the first step", self.mesh.line.ranks, watch.log.patience_s)

    def _wires(self) -> list[WireEnds]:
        """Between which ranks of a pipeline this program sends what, alike on all of them."""
        ops = (op for rank in self.verified.program.ranks for op in rank if op.comm is not None)
        used = {(op.kind.form.name, op.comm[0]) for op in ops if op.kind in TRANSFERS and op.comm is not None}
        wires: list[WireEnds] = []
        for form, wire in sorted(used):
            source, target = map(int, wire.split(">"))
            wires.append((self.mesh.pipe(form, source, target), source, target))
        return wires

    # ops

    def _op(self, op: Op) -> InFlight[Any] | None:
        if op.kind in (*LAUNCHES, *ENDS, *COPIES):
            return self._run(op)
        # Lanes log transfers themselves, and one rank has nobody who would wait for it.
        if op.kind in TRANSFERS or self.mesh.num_ranks == 1:
            return self._timed(op)
        log = self.mesh.watch.log
        logged = log.launch("compute", str(op))
        log.start(logged, self._stream())
        transfer = self._timed(op)
        log.end(logged, self._stream())
        return transfer

    def _stream(self) -> int | None:
        return torch.cuda.current_stream().cuda_stream if self.mesh.device.type == "cuda" else None

    def _timed(self, op: Op) -> InFlight[Any] | None:
        recorder = self.mesh.recorder
        if self.observe is None:
            with recorder.mark(op):
                return self._run(op)
        begun = recorder.stamp()
        with recorder.mark(op):
            transfer = self._run(op)
        self.observe(op, begun, recorder.stamp())
        return transfer

    def _run(self, op: Op) -> InFlight[Any] | None:
        if op.kind in TRANSFERS:
            return self._send(op) if op.kind.part is Part.SEND else self._receive(op)
        if op.kind in self.ends:
            self.ends[op.kind](op)
        if op.layer is None or op.kind in LAUNCHES:
            return None  # its host has launched it; what ends a step is the optimizer's
        if self.weights is not None and self.weights.run(op):
            return None
        at = At.of(op)
        passes = self._open(at)
        if self.inputs is not None and travels(self.shape, op) and self._moved(self.inputs, op, at, passes):
            return None
        chosen = range(len(passes)) if op.chunk is None or len(passes) == 1 else (op.chunk,)
        transfers = [self._run_part(at, passes, chunk, op.kind) for chunk in chosen]
        self._left[at] -= 1
        if not self._left[at]:
            self._close(at, passes)
        under_way = [transfer for transfer in transfers if transfer is not None]
        return Joined(under_way) if under_way else None

    def _moved(self, inputs: TravellingInputs, op: Op, at: At, passes: list[StagePass]) -> bool:
        """What an op does to the input of its layer; True: that was all."""
        key = InputKey(*at)
        if op.kind is kinds.INPUT_STORE:
            inputs.store(key, [one.layers[at.layer].leave_input() for one in passes])
            before = [one.layers[at.layer - 1] for one in passes] if at.layer else []
            if not at.layer and (earlier := self._passes.get((at.stage - 1, at.microbatch))):
                before = [one.layers[-1] for one in earlier]
            for one in before:
                one.forget_output()
        elif op.kind is kinds.INPUT_FETCH:
            inputs.fetch(key)
        elif op.kind is kinds.ATTN_F:
            inputs.make_room()
        elif op.kind is kinds.ATTN_R and op.chunk in (None, 0):
            parts = inputs.arrived(key).split([one.microbatch.rows for one in passes])
            for one, part in zip(passes, parts, strict=True):
                one.layers[at.layer].take_input(part)
        return op.kind in COPIES

    def _open(self, at: At) -> list[StagePass]:
        key = (at.stage, at.microbatch)
        if key not in self._passes:
            chunks = self.chunks.get(at.microbatch, 1)
            fed = [self._feed(at.microbatch, chunk, chunks) for chunk in range(chunks)]
            self._passes[key] = [StagePass(microbatch=part) for part in fed]
        return self._passes[key]

    def _close(self, at: At, passes: list[StagePass]) -> None:
        """A layer has run its last op: all that it holds goes, but for a gradient that nobody took yet."""
        for one in passes:
            one.layers[at.layer] = Finished(one.layers[at.layer].gradient())
            one.num_finished += 1
        if all(one.num_finished == len(one.layers) for one in passes):
            del self._passes[at.stage, at.microbatch]

    def _run_part(self, at: At, passes: list[StagePass], chunk: int, kind: Kind) -> InFlight[Any] | None:
        one = passes[chunk]
        if kind.part is Part.HEAD:
            self._head(at, one, chunk, kind.form)
            return None
        if kind is kinds.ATTN_F:
            h = one.layers[-1].output() if at.layer else self._input(at, passes, chunk)
            where = Where(wgrads=self.wgrads, **at._asdict(), chunk=chunk)
            layer = self.stages[at.stage].layers[at.layer]
            shape = self.shape.layers[at.stage][at.layer]
            one.layers.append(begin(layer, h, one.microbatch, where, shape))
        running = one.layers[at.layer]
        if kind.form is Form.B and at.layer not in one.ready:
            running.take_gradient(self._gradient_into(at, passes, chunk))
            one.ready.add(at.layer)
        transfer = running.run(kind)
        if kind is kinds.ATTN_B and at.layer == 0:
            self._leave_stage(at, one, chunk)
        return transfer

    def _input(self, at: At, passes: list[StagePass], chunk: int) -> torch.Tensor:
        """What the first layer of a stage reads."""
        one, embed = passes[chunk], self.stages[at.stage].embed
        if embed is not None:
            one.embedded = Segment(lambda: (embed(one.microbatch),), [], self._deferral(at, chunk, "EMBED"))
            return one.embedded.outputs[0]
        before = (at.stage - 1, at.microbatch)
        if before in self._passes:  # the same rank holds both stages
            return self._passes[before][chunk].layers[-1].output()
        return self._arrived(Form.F, at, passes, chunk)

    def _deferral(self, at: At, chunk: int, part: str) -> Deferral:
        return Where(
            wgrads=self.wgrads, microbatch=at.microbatch, stage=at.stage, layer=-1, chunk=chunk
        ).deferral(part)

    def _arrived(self, form: Form, at: At, passes: list[StagePass], chunk: int) -> torch.Tensor:
        key = (form, at.stage, at.microbatch)
        parts = self._received[key].get().split([one.microbatch.rows for one in passes])
        if form is Form.B and chunk == 0:  # who answers has received: what was sent can go
            self._sent.pop((at.stage, at.microbatch)).get()
        if chunk == len(passes) - 1:
            del self._received[key]
        return parts[chunk]

    def _gradient_into(self, at: At, passes: list[StagePass], chunk: int) -> torch.Tensor:
        """The gradient of a layer's output."""
        one, key = passes[chunk], (at.stage, at.microbatch)
        found: torch.Tensor | None
        if at.layer + 1 < len(one.layers):
            found = one.layers[at.layer + 1].gradient()
        elif one.head is not None:
            found, one.d_out = one.d_out, None
        elif key in self._handed:
            found = self._handed[key][chunk]
            if chunk == len(passes) - 1:
                del self._handed[key]
        else:
            found = self._arrived(Form.B, at, passes, chunk)
        assert found is not None, f"no gradient reached layer {at.layer} of stage {at.stage}"
        return found

    def _head(self, at: At, one: StagePass, chunk: int, form: Form) -> None:
        head = self.stages[at.stage].head
        assert head is not None
        if form is Form.F:
            h, microbatch = one.layers[-1].output(), one.microbatch
            deferral = self._deferral(at, chunk, Part.HEAD.name)
            one.head = Segment(lambda h: (head(h, microbatch),), [h], deferral)
            return
        assert one.head is not None
        if form is Form.B:
            (one.d_out,) = one.head.backward([self._scale])
        else:
            one.head.weights()

    def _leave_stage(self, at: At, one: StagePass, chunk: int) -> None:
        """The gradient of the stage's input is there: to the embedding, or to the stage before."""
        d_h = one.layers[0].gradient()
        assert d_h is not None
        if one.embedded is not None:
            one.embedded.backward([d_h])
            one.embedded.weights()
            return
        parts = self._handed.setdefault((at.stage - 1, at.microbatch), [])
        assert len(parts) == chunk, "chunks leave a stage in order"
        parts.append(d_h)

    # transfers

    def _launch(
        self, op: Op, tensor: torch.Tensor, start: Callable[..., Any], value: Carried
    ) -> InFlight[Carried]:
        """One message on the wire of an op, which brings `value`; `start` is dist.isend or dist.irecv."""
        assert op.comm is not None
        mesh = self.mesh
        source, target = map(int, op.comm[0].split(">"))
        group = mesh.pipe(op.kind.form.name, source, target)
        other = group.ranks[source if mesh.pp_index == target else target]
        what = "activations" if op.kind.form is Form.F else "gradients"
        label = f"{what} {op} (stage {op.stage}, microbatch {op.microbatch}) on lane {op.lane}"
        seq = op.comm[1]

        def go() -> Any:
            return start(tensor, other, group=group.handle, tag=seq)

        return mesh.lane(op.lane).launch(group, label, go, value, tensor)

    def _send(self, op: Op) -> InFlight[None]:
        stage, microbatch = op.stage or 0, op.microbatch or 0
        if op.kind is kinds.SEND_F:
            parts = [one.layers[-1].output() for one in self._passes[stage, microbatch]]
        else:
            parts = self._handed.pop((stage - 1, microbatch))
        rows = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
        sent = self._launch(op, rows, dist.isend, None)  # which keeps rows no longer than it must
        if op.kind is kinds.SEND_F:
            self._sent[stage, microbatch] = sent
        return sent

    def _receive(self, op: Op) -> InFlight[torch.Tensor]:
        stage, microbatch = op.stage or 0, op.microbatch or 0
        chunks = self.chunks.get(microbatch, 1)
        rows = sum(self._feed(microbatch, chunk, chunks).rows for chunk in range(chunks))
        out = torch.empty(rows, self.width, dtype=self.dtype, device=self.mesh.device)
        received = self._launch(op, out, dist.irecv, out)
        self._received[op.kind.form, stage, microbatch] = received
        return received


def cuts_of(verified: Verified) -> dict[int, int]:
    """Chunks of each microbatch that any op of any rank cuts."""
    return {
        op.microbatch: op.chunks
        for ops in verified.program.ranks
        for op in ops
        if op.chunks > 1 and op.microbatch is not None
    }
