"""A microbatch's forward and backward as a CUDA graph: one launch instead of thousands.

Idea. On one rank nothing of a microbatch depends on what the host learns on the way: no row is dropped,
counts stay on the device, gradients add into buffers that never move. On several ranks the same holds where
all tokens are gathered (`moe/exchange/gathered`), whose transfers are parts of the graph. So all of it is
captured once and replayed with other tokens.

There are two graphs: the first microbatch of a step *stores* its gradients, further ones *add*
(`tensor/weight_grad`); where microbatches are not alike, two for each number of samples. They share one pool
of memory, because they never run at once.

Contract. Same bits as without: the captured kernels are those that run eagerly. The first WARM_STEPS steps
run eagerly, so that kernels are compiled, tuned and loaded; where something cannot be captured (a layer of a
user's own that asks the host) this is told once, and everything goes on eagerly.

Hazard. What Python does in a captured microbatch happens once. Random numbers that are keyed by step, a loss
scale, hooks: whoever needs them gives them as tensors or is not captured (`obstacle`). Buffers are written in
place and never replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn

from moeclipse.comm.async_ops.record import Recorder, Region
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import GRAPHS
from moeclipse.model.segment_memory import memories
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.tensor.weight_grad import Accumulation
from moeclipse.train.config import TrainConfig

WARM_STEPS = 2
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""Forward and backward of (inputs, targets), the loss times a scale; and the number of the microbatch."""


class Replay(Protocol):
    """What a capture gives: the work, once more."""

    def replay(self) -> None: ...


class Capture(Protocol):
    """Captures work instead of doing it; `eagerly` does it where it would be captured."""

    def eagerly(self, work: Callable[[], None]) -> None: ...
    def capture(self, work: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """On a stream of its own, warm-up included: autograd remembers the stream of a first backward."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def eagerly(self, work: Callable[[], None]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def capture(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        GRAPHS.add(graph)
        try:
            with self._into(graph):
                work()
        except RuntimeError:
            # A capture that failed leaves the generator waiting for its end: nobody could draw any more.
            generator = torch.cuda.default_generators[self._stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return graph

    def _into(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        # Other threads, which write files and watch, may use the device meanwhile.
        return torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")


class Captured:
    """A graph, what it launches, and which accumulators hold something once it has run."""

    def __init__(self, graph: Replay, filled: list[Accumulation], region: Region, microbatch: int) -> None:
        self.graph, self.filled, self.region, self.microbatch = graph, filled, region, microbatch

    def run(self, recorder: Recorder, microbatch: int) -> None:
        recorder.replay(self.region, f"microbatch {self.microbatch}", f"microbatch {microbatch}")
        self.graph.replay()
        for state in self.filled:
            state.empty = False


class Graphs:
    """When to replay, and what is to be said of it."""

    def __init__(self, capture: Capture, recorder: Recorder) -> None:
        self._capture, self._recorder = capture, recorder
        self._steps = 0
        self.eager = False
        """Somebody watches what Python does: nothing is replayed."""
        self.first_eagerly = False
        """The first microbatch of a step is never replayed: weights are updated inside of its forward."""
        self.refused = ""
        """Why nothing is captured any more."""
        self._notes: list[str] = []

    def _warm(self, first: bool) -> bool:
        """Whether a microbatch, the first of its step or not, may be replayed."""
        self._steps += first and not self.eager
        replayed = not self.eager and not (first and self.first_eagerly)
        return not self.refused and replayed and self._steps > WARM_STEPS

    def _refuse(self, error: RuntimeError) -> None:
        self.refused = str(error).splitlines()[0]
        self._notes.append(f"microbatches run without CUDA graphs: {self.refused}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, microbatches run eagerly: hooks see every tensor."""
        self.eager = True
        try:
            yield
        finally:
            self.eager = False

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes


class MicrobatchGraphs(Graphs):
    """Runs the microbatches of a learner, captured once they are warm."""

    def __init__(
        self, compute: Compute, states: Iterable[Accumulation], capture: Capture, recorder: Recorder
    ) -> None:
        super().__init__(capture, recorder)
        self._compute, self._states = compute, list(states)
        self._graphs: dict[tuple[bool, torch.Size], Captured] = {}
        self._inputs: dict[torch.Size, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._scales: dict[torch.Size, float] = {}

    def run(self, inputs: torch.Tensor, targets: torch.Tensor, scale: float, microbatch: int) -> None:
        """Microbatch 0 is the first of its step."""
        first = microbatch == 0
        if not self._warm(first):
            scaled = inputs.new_full((), scale, dtype=torch.float64)
            self._capture.eagerly(lambda: self._compute(inputs, targets, scaled, microbatch))
            return
        given = self._put(inputs, targets, scale)
        captured = self._graphs.get((first, inputs.shape)) or self._captured(microbatch, given)
        if captured is None:
            self._capture.eagerly(lambda: self._compute(*given, microbatch))
        else:
            captured.run(self._recorder, microbatch)

    def _put(
        self, inputs: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the graphs read them."""
        if inputs.shape not in self._inputs:
            number = inputs.new_zeros((), dtype=torch.float64)
            self._inputs[inputs.shape] = torch.empty_like(inputs), torch.empty_like(targets), number
        mine = self._inputs[inputs.shape]
        mine[0].copy_(inputs)
        mine[1].copy_(targets)
        if self._scales.get(inputs.shape) != scale:  # a launch only where it changes
            mine[2].fill_(scale)
            self._scales[inputs.shape] = scale
        return mine

    def _captured(
        self, microbatch: int, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> Captured | None:
        empty = [state for state in self._states if state.empty]
        try:
            # A capture launches nothing: what it lists passes when it is replayed.
            with self._recorder.apart("capture"), self._recorder.region() as region:
                graph = self._capture.capture(lambda: self._compute(*given, microbatch))
        except RuntimeError as error:
            for state in empty:  # nothing was computed
                state.empty = True
            self._refuse(error)
            return None
        filled = [state for state in empty if not state.empty]
        found = self._graphs[microbatch == 0, given[0].shape] = Captured(graph, filled, region, microbatch)
        return found


def obstacle(config: TrainConfig, mesh: Mesh, model: nn.Module) -> str:
    """Why a microbatch cannot be a graph; empty where it can."""
    layers = [layer for _, layer in moe_layers(model)]
    if config.run.graphs == "off":
        return "run.graphs is off"
    if config.runs_program(mesh.pp, mesh.num_ranks):
        return "a program says what runs when"
    if mesh.tp > 1:
        return "linears exchange rows inside of attention"
    if config.data.batch_size % (config.optim.accumulate * mesh.num_data):
        return "ranks have different numbers of samples"
    if mesh.num_ranks > 1 and not any(layer.gathers for layer in layers):
        return "sizes of rows are told to the host, or gradients are reduced beside backward"
    if mesh.device.type != "cuda":
        return "there is no CUDA device"
    if mesh.num_ranks > 1 and mesh.world.backend != "nccl":
        return "only NCCL's transfers, and ours, can be captured"
    if config.memory.activations == "host":
        return "inputs of layers travel to the host and back"
    if config.memory.main_grad == "host":
        return "gradients travel to the host and back"
    if config.memory.weights == "host":
        return "weights come from the host, layer by layer"
    if config.optim.clip == "layer":
        return "layers are updated while backward goes on"
    if config.data.source or config.data.documents == "packed" or config.data.kind == "chat":
        return "documents and sources are others in every microbatch"
    if any(memories(model)):
        return "what layers remember is kept by the host"
    if config.model.held_mixers != {"attention"}:
        return "mixers other than attention were never captured"
    if not all(layer.runs_on_device for layer in layers):
        return "gates that draw by the step, capacities and experts without kernels need the host"
    return ""
