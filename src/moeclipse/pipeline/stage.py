"""What a model offers to the pipeline: stages of layers, each layer in parts that a schedule can place.

A layer that knows its parts returns a `LayerPass` from `begin`: the state of one microbatch on its way
through it. The parts and the forms of each are those of `schedule/kinds`:

    ATTN ROUTE SHARED DISPATCH MLP COMBINE     F forward   B input gradients   W weight gradients   R again

A layer without `begin` still runs, whole, at the place of its attention (`WholeLayer`). The runtime asks for
nothing else, so a user's own model can be run by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.pipeline.backward import Deferral, Segment
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Kind, Part
from moeclipse.schedule.shape import LayerShape
from moeclipse.tensor.weight_grad import WeightGrads


@dataclass(frozen=True, kw_only=True)
class Where:
    """Names a pass."""

    wgrads: WeightGrads
    microbatch: int
    stage: int
    layer: int
    """Position in the stage."""
    chunk: int

    def deferral(self, part: str) -> Deferral:
        name = f"layer {self.layer} {part} chunk {self.chunk}"
        return Deferral(wgrads=self.wgrads, microbatch=self.microbatch, stage=self.stage, part=name)


class LayerPass(Protocol):
    """One microbatch, or one chunk of it, in one layer. Calls come in the order that the verifier allows."""

    def run(self, kind: Kind) -> InFlight[Any] | None:
        """One op; an exchange returns its transfer."""
        ...

    def output(self) -> torch.Tensor:
        """What the next layer reads, once all parts have run forward."""
        ...

    def take_gradient(self, d_out: torch.Tensor) -> None:
        """The gradient of the output, before the first part runs backward."""

    def gradient(self) -> torch.Tensor | None:
        """That of the input, after the last; asked for once."""
        ...

    # Where its input lies on the host between forward and backward (`schedule/input_travel`).

    def leave_input(self) -> torch.Tensor:
        """Given away, behind ATTN_F."""
        ...

    def take_input(self, h: torch.Tensor, /) -> None:
        """The same values, ahead of ATTN_R."""

    def forget_output(self) -> None:
        """It was the input of the next layer, and has left."""


@runtime_checkable
class SplitLayer(Protocol):
    """A layer that offers its parts."""

    def describe(self) -> LayerShape: ...

    def begin(self, h: torch.Tensor, microbatch: Any, where: Where, layer: LayerShape, /) -> LayerPass: ...


class Stage(Protocol):
    """A piece of the model. `microbatch` is whatever the model was given for it."""

    @property
    def layers(self) -> Sequence[nn.Module | SplitLayer]: ...

    @property
    def embed(self) -> Callable[[Any], torch.Tensor] | None:
        """First stage: the input of its first layer."""
        ...

    @property
    def head(self) -> Callable[[torch.Tensor, Any], torch.Tensor] | None:
        """Last stage: the loss, from the output of its last layer."""
        ...


class WholeLayer:
    """A layer that does not know its parts, in one piece."""

    def __init__(
        self, module: nn.Module, h: torch.Tensor, microbatch: Any, where: Where, again: bool
    ) -> None:
        self._begin = lambda: Segment(
            lambda h: (module(h, microbatch),), [h], where.deferral("whole"), again=again
        )
        self._segment: Segment | None = None
        self._back: torch.Tensor | None = None
        self._d_out: torch.Tensor | None = None
        self._d_in: torch.Tensor | None = None

    def run(self, kind: Kind) -> InFlight[Any] | None:
        if kind.part is not Part.ATTN:
            return None
        if kind is kinds.ATTN_F:
            self._segment = self._begin()
        assert self._segment is not None
        if kind is kinds.ATTN_R:
            self._segment.recompute(() if self._back is None else (self._back,))
            self._back = None
        elif kind is kinds.ATTN_B:
            (self._d_in,) = self._segment.backward([self._d_out])
        elif kind is kinds.ATTN_W:
            self._segment.weights()
        return None

    def output(self) -> torch.Tensor:
        assert self._segment is not None
        return self._segment.outputs[0]

    def leave_input(self) -> torch.Tensor:
        assert self._segment is not None
        (h,) = self._segment.leave_inputs()
        return h

    def take_input(self, h: torch.Tensor) -> None:
        self._back = h

    def forget_output(self) -> None:
        assert self._segment is not None
        self._segment.outputs = ()

    def take_gradient(self, d_out: torch.Tensor) -> None:
        self._d_out = d_out

    def gradient(self) -> torch.Tensor | None:
        d_in, self._d_in = self._d_in, None
        return d_in


def describe(layer: nn.Module | SplitLayer) -> LayerShape:
    """The layer as a schedule sees it; one without parts looks like a dense one."""
    return layer.describe() if isinstance(layer, SplitLayer) else LayerShape(moe=False, shared=False)


def begin(
    layer: nn.Module | SplitLayer, h: torch.Tensor, microbatch: Any, where: Where, shape: LayerShape
) -> LayerPass:
    if isinstance(layer, SplitLayer):
        return layer.begin(h, microbatch, where, shape)
    return WholeLayer(layer, h, microbatch, where, again=Part.ATTN in shape.recomputed)
