"""Parts of a microbatch as CUDA graphs, where ranks exchange rows between them.

Idea. What stands between two exchanges asks nobody: attention and gate, a dense layer, a layer with all its
experts (`model/front`). Forward and backward of each are captured apart and take one launch; exchanges, and
experts whose rows are others in every microbatch, run eagerly. As with whole microbatches
(`train/step/graphs`) there are two of each: the first microbatch of a step stores its gradients, further ones
add; and as many for each number of tokens, where microbatches are not alike.

Contract. The same bits as without. Buckets hear of complete gradients as they do from autograd, so they are
reduced beside the rest of backward. All graphs share one pool of memory: they are replayed in the order in
which they were captured, forward of all layers and then backward, and that of a microbatch before the next.
What they give lies in it, too, and only its reader keeps it: others may have the place behind that.

Hazard. What a part gives lies where later parts overwrite it: nobody may keep it longer than its readers did
in the microbatch that was captured, nor longer than the microbatch's own backward. What a part reads beside
its input (weights, tables, biases) never moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.function import FunctionCtx

from moeclipse.comm.async_ops.reading import flat
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.model.front import Front
from moeclipse.model.layer import TransformerLayer
from moeclipse.model.recompute import Part
from moeclipse.model.segment_memory import memories
from moeclipse.model.transformer import Transformer
from moeclipse.ops.first_order import first_order
from moeclipse.tensor.weight_grad import Accumulation, unheard
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.graphs import Capture, CudaCapture, Graphs, Replay

Tensors = tuple[torch.Tensor, ...]
Captures = Callable[[Callable[[], None]], Replay]


class CaptureOfParts(Capture, Protocol):
    def make_room(self) -> None:
        """Give back what steps without graphs took."""

    def unkept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which nobody keeps by it: later captures may have it, too."""
        ...


class PartCapture(CudaCapture):
    """Many small captures in the middle of a step: the first alone clears the device's memory."""

    def make_room(self) -> None:
        # Graphs have memory of their own: what eager steps took would lie beside it, unused.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def unkept(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor.detach()
        # The graphs keep the pool, so there will be memory at that address as long as somebody replays them.
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        bytes_there = flat(whole, tensor.device)
        found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return found.set_(
            bytes_there.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    @contextmanager
    def _into(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()


class GraphInputs:
    """Memory in which graphs find what eager work gives them: those that never run at once share it."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor, *user: object) -> torch.Tensor:
        """Of this user, as large as `tensor`."""
        key = (*user, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._found:
            self._found[key] = torch.empty_like(tensor)
        return self._found[key].detach()


class CapturedPart:
    """One part for one kind of microbatch."""

    def __init__(
        self,
        part: Part,
        x: torch.Tensor,
        states: Sequence[Accumulation],
        captures: Captures,
        unkept: Callable[[torch.Tensor], torch.Tensor],
        inputs: GraphInputs,
        index: int,
    ) -> None:
        self._part, self._states, self._captures = part, states, captures
        self._inputs, self._unkept = inputs, unkept
        # What a layer reads is there until its backward: other kinds of microbatches may have the place.
        self._x = inputs.like(x, index).requires_grad_(x.requires_grad)
        self._outputs: Tensors = ()
        self.without_gradient: list[bool] = []
        self._dx: torch.Tensor | None = None
        self._grads: list[torch.Tensor | None] | None = None
        self._backward: Replay | None = None
        self._filled: list[Accumulation] = []
        self._heard: list[Accumulation] = []
        self._forward = captures(self._run)

    def _run(self) -> None:
        with torch.enable_grad():
            self._outputs = self._part(self._x)
        self.without_gradient = [not tensor.requires_grad for tensor in self._outputs]

    def forward(self, x: torch.Tensor) -> Tensors:
        self._x.data.copy_(x)  # not a change that autograd should mind: backward reads what forward read
        self._forward.replay()
        return tuple(tensor.detach() for tensor in self._outputs)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Of x; those of weights are where they belong, and who waits for them has heard."""
        if self._grads is None:
            # Read before the next layer's backward begins: one place for all layers.
            self._grads = [
                None if grad is None else self._inputs.like(grad, "grad", n) for n, grad in enumerate(grads)
            ]
        for mine, given in zip(self._grads, grads, strict=True):
            if (mine is None) != (given is None):
                raise RuntimeError("a part got gradients for other outputs than when it was captured")
            if mine is not None and given is not None:
                mine.copy_(given)
        dx = self._dx
        if self._backward is None:
            dx = self._capture_backward()
        assert self._backward is not None
        self._backward.replay()
        for state in self._filled:
            state.empty = False
        for state in self._heard:
            state.backward_done()
        return None if dx is None else dx.detach()

    def _capture_backward(self) -> torch.Tensor | None:
        """What it gives for x, kept by who takes it."""
        empty = [state for state in self._states if state.empty]
        try:
            with unheard(self._states) as self._heard:
                self._backward = self._captures(self._run_backward)
        except RuntimeError as error:
            # Half of autograd's graph is gone: this microbatch cannot go on eagerly.
            why = str(error).splitlines()[0]
            raise ConfigError(f'backward cannot be captured: {why}; set run.graphs to "off"') from error
        self._filled = [state for state in empty if not state.empty]
        # Whoever reads these in this microbatch keeps them as long as others will read them in later ones:
        # what is captured then, and behind that, may have their memory.
        self._outputs = tuple(self._unkept(t) if t.requires_grad else t for t in self._outputs)
        dx, self._x.grad = self._x.grad, None
        self._dx = None if dx is None else self._unkept(dx)
        return dx

    def _run_backward(self) -> None:
        assert self._grads is not None
        pairs = zip(self._outputs, self._grads, strict=True)
        given = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        self._x.grad = None
        tensors, gradients = zip(*given, strict=True)
        torch.autograd.backward(tensors, gradients)


class ReplayedContext(FunctionCtx):
    part: CapturedPart


class _Replayed(torch.autograd.Function):
    """
    forward    outputs = part(x)
    dgrad      dx
    wgrad      by the part itself
    """

    @staticmethod
    def forward(ctx: ReplayedContext, x: torch.Tensor, part: CapturedPart) -> Tensors:
        ctx.part = part
        ctx.set_materialize_grads(False)
        outputs = part.forward(x)
        plain = [out for out, no in zip(outputs, part.without_gradient, strict=True) if no]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    @first_order
    def backward(ctx: ReplayedContext, *grads: torch.Tensor | None) -> tuple[object, ...]:
        return ctx.part.backward(grads), None


class PartGraphs(Graphs):
    """Runs the layers of a model, whose parts are captured once they are warm."""

    _capture: CaptureOfParts

    def __init__(
        self, layers: Sequence[TransformerLayer], capture: CaptureOfParts, recorder: Recorder
    ) -> None:
        super().__init__(capture, recorder)
        self._kind: bool | None = None
        """Of the microbatch that runs, if it is replayed: whether it is the first of its step."""
        self._parts: dict[tuple[int, bool, torch.Size], CapturedPart] = {}
        self._inputs = GraphInputs()
        self._fronts = [Front(layer, self._run_of(layer)) for layer in layers]
        self._shapes: list[tuple[Any, ...]] = []
        for front in self._fronts:
            front.layer.front = front

    def run(self, work: Callable[[], None], *, first: bool) -> None:
        """A microbatch; `first`: of its step."""
        self._kind = first if self._warm(first) else None
        if (shapes := [front.shape for front in self._fronts]) != self._shapes:
            self._parts.clear()  # all, not those that changed: they share memory by the order of captures
            self._inputs = GraphInputs()
            self._shapes = shapes
        try:
            self._capture.eagerly(work)
        finally:
            self._kind = None

    def _run_of(self, layer: TransformerLayer) -> Callable[[Part, torch.Tensor], Tensors]:
        states = [vars(p)["accumulation"] for p in layer.parameters() if "accumulation" in vars(p)]

        def run(part: Part, x: torch.Tensor) -> Tensors:
            if self._kind is None or self.refused:
                return part(x)
            key = layer.index, self._kind, x.shape
            if key not in self._parts:
                if not self._parts:
                    self._capture.make_room()
                try:
                    self._parts[key] = CapturedPart(
                        part, x, states, self._captured, self._capture.unkept, self._inputs, layer.index
                    )
                except RuntimeError as error:
                    self._refuse(error)
                    return part(x)
            found: Tensors = _Replayed.apply(x, self._parts[key])
            return found

        return run

    def _captured(self, work: Callable[[], None]) -> Replay:
        with self._recorder.apart("capture"), self._recorder.region() as launched:
            replay = self._capture.capture(work)
        assert not launched, "a part asks no other rank"
        return replay


def obstacle_to_parts(config: TrainConfig, mesh: Mesh, model: Transformer) -> str:
    """Why parts of a microbatch cannot be graphs; empty where they can."""
    if why := obstacle_in_config(config, mesh):
        return why
    if any(memories(model)):
        return "what layers remember is kept by the host"
    if any(layer.again != "off" for layer in model.all_layers):
        return "recomputed segments span an all-to-all"
    return ""


def obstacle_in_config(config: TrainConfig, mesh: Mesh) -> str:
    """The same before there is a model, in which nothing is recomputed."""
    if config.run.graphs == "off":
        return "run.graphs is off"
    if config.runs_program(mesh.pp, mesh.num_ranks):
        return "a program says what runs when"
    if mesh.device.type != "cuda":
        return "there is no CUDA device"
    if mesh.tp > 1:
        return "linears exchange rows inside of attention"
    if config.data.documents == "packed" or config.data.kind == "chat":
        return "documents are others in every microbatch"
    if config.model.held_mixers != {"attention"}:
        return "mixers other than attention were never captured"
    return ""
