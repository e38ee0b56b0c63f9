"""Pieces of a model between detached boundaries, with backward in two parts.

    segment = Segment(function, inputs)      forward; its graph ends at the inputs
    d_inputs = segment.backward(d_outputs)   B: input gradients; weight products are queued
    segment.weights()                        W: the queued products add into main_grad

A segment that will be recomputed runs forward without a graph, and once more, with one, before its backward.
Random numbers (dropout of a user's own layer) are drawn alike both times.

Hazard: what does not go through `tensor/weight_grad` (norms, a user's nn.Linear) gets its weight gradient
in B already; it is correct, but nothing of it is left for W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moeclipse.tensor.weight_grad import WeightGrads

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Deferral:
    """Where a segment's weight products are queued."""

    wgrads: WeightGrads
    microbatch: int
    stage: int
    part: str


class Segment:
    def __init__(
        self,
        function: Callable[..., Tensors],
        inputs: Sequence[torch.Tensor],
        deferral: Deferral | None = None,
        *,
        again: bool = False,
    ) -> None:
        """`again`: keep nothing but the inputs, nor them if they are released; `recompute` comes before
        backward."""
        self._function: Callable[..., Tensors] | None = function
        self._deferral = deferral
        self._leaves = [leaf_of(tensor) for tensor in inputs]
        self._outputs: Tensors = ()
        self._random = random_state() if again else None
        if again:
            with torch.no_grad():
                self.outputs = tuple(tensor.detach() for tensor in function(*self._leaves))
        else:
            self._run()

    outputs: Tensors
    """Detached: whoever reads them begins a segment of its own."""

    def _run(self) -> None:
        assert self._function is not None
        with torch.enable_grad():
            self._outputs = self._function(*self._leaves)
        self.outputs = tuple(tensor.detach() for tensor in self._outputs)

    def release(self) -> None:
        """Let go of inputs and outputs: whoever runs this again makes the inputs again as well."""
        assert self._random is not None, "backward of a segment that kept its graph wants its inputs"
        self._leaves, self.outputs = [], ()

    def leave_inputs(self) -> list[torch.Tensor]:
        """They are somebody else's until `recompute` is given the same values."""
        assert self._random is not None, "backward of a segment that kept its graph wants its inputs"
        found, self._leaves = [leaf.detach() for leaf in self._leaves], []
        return found

    def recompute(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Forward once more, with a graph; of inputs that were released the same values are given."""
        assert self._random is not None, "this segment kept its graph: there is nothing to recompute"
        assert bool(inputs) != bool(self._leaves), "inputs are kept or given"
        self._leaves = self._leaves or [leaf_of(tensor) for tensor in inputs]
        now = random_state()
        set_random_state(self._random)
        self._run()
        set_random_state(now)

    def backward(
        self, grads: Sequence[torch.Tensor | None], more: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs; `more` are (tensor, gradient) of others that hang on the same graph."""
        pairs = [
            (t, g) for t, g in zip(self._outputs, grads, strict=True) if g is not None and t.requires_grad
        ]
        pairs += [(t, g) for t, g in more if t.requires_grad]
        self._outputs = self.outputs = ()
        self._function = None  # it may know whoever holds this segment: a cycle would outlive the step
        if pairs:
            tensors, gradients = zip(*pairs, strict=True)
            if self._deferral is None:
                torch.autograd.backward(tensors, gradients)
            else:
                where = self._deferral
                with where.wgrads.deferred(microbatch=where.microbatch, stage=where.stage, part=where.part):
                    torch.autograd.backward(tensors, gradients)
        found = [leaf.grad for leaf in self._leaves]
        self._leaves = []
        return found

    def weights(self) -> None:
        where = self._deferral
        assert where is not None
        where.wgrads.run_if_any(microbatch=where.microbatch, stage=where.stage, part=where.part)


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state() if on_cuda else None


def set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
