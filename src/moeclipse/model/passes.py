"""A transformer layer in parts that a pipeline's schedule can place (`pipeline/stage`).

    ATTN       h -> h', x          attention, and the norm in front of the feed-forward block
    ROUTE      x -> scores         gate, and the exchange of sizes
    SHARED     x -> y              shared experts
    DISPATCH, MLP, COMBINE         `moe/exchange/pipeline_pieces`
    output     h' + y

ATTN, ROUTE and a dense MLP are segments of autograd with detached ends; experts know their own backward.
Losses of the router are computed where they are needed, in ROUTE_B, so nobody waits for the sum of loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.model.config import ModelConfig
from moeclipse.model.layer import TransformerLayer
from moeclipse.model.rotary import Positions
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.exchange.pipeline_pieces import ExpertPass
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.layer import MoE
from moeclipse.moe.losses import MoEReport
from moeclipse.moe.tokens import Loads, Structure, Tokens
from moeclipse.pipeline.backward import Segment
from moeclipse.pipeline.stage import LayerPass, Where
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import Kind, Part
from moeclipse.schedule.shape import LayerShape
from moeclipse.tensor.weight_grad import deliver


class MicrobatchLoads:
    """The loads of one microbatch, layer by layer: balance is over all of it, also where it is cut."""

    def __init__(self, chunks: int, *, each: bool = False) -> None:
        """`each`: every chunk tells its own, because replicas share the rows of one chunk at a time."""
        self.chunks, self.each = chunks, each
        self._routings: dict[int, list[Routing]] = {}
        self._loads: dict[int, list[Loads]] = {}

    def add(self, moe: MoE, routing: Routing, tokens: Tokens) -> Loads | None:
        """The chunk's own, if they are on their way: they are sent after the last chunk, or with each."""
        found = self._routings.setdefault(moe.layer, [])
        found.append(routing)
        if not self.each and len(found) < self.chunks:
            return None
        loads = moe.gather_loads(found, tokens)
        self._loads.setdefault(moe.layer, []).append(loads)
        found.clear()
        return loads if self.each or self.chunks == 1 else None

    def of(self, moe: MoE) -> torch.Tensor:
        """The load of each expert, all chunks together."""
        totals = [loads.total() for loads in self._loads[moe.layer]]
        return sum(totals[1:], start=totals[0])


@dataclass(kw_only=True)
class MicrobatchState:
    """One chunk of a microbatch as the model reads it, and what it says about it."""

    ids_BS: torch.Tensor
    targets_BS: torch.Tensor
    positions: Positions
    tokens: Tokens
    rows: int
    """Rows of activations of this rank."""
    loads: MicrobatchLoads
    aux_scale: torch.Tensor
    """What the router's losses count for."""
    loss_sum: torch.Tensor | None = None
    loss_T: torch.Tensor | None = None
    """Of each token, without a gradient."""
    reports: list[MoEReport] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ModelStage:
    """A piece of the model, as `pipeline/stage` wants it."""

    layers: Sequence[LayerParts]
    embed: Callable[[MicrobatchState], torch.Tensor] | None
    head: Callable[[torch.Tensor, MicrobatchState], torch.Tensor] | None


def layer_shapes(config: ModelConfig, moe: MoEConfig) -> list[LayerShape]:
    """All layers of a model as a schedule sees them."""
    return [
        LayerShape(moe=not config.is_dense(index), shared=moe.num_shared_experts > 0)
        for index in range(config.num_layers)
    ]


Methods = Mapping[Kind, Callable[[Any], InFlight[Any] | None]]
"""What a pass does for each op of its layer."""


class DensePass:
    """Attention and a feed-forward block without experts."""

    def __init__(
        self,
        layer: TransformerLayer,
        h_TD: torch.Tensor,
        microbatch: MicrobatchState,
        where: Where,
        shape: LayerShape,
    ) -> None:
        self.layer, self.microbatch, self.where, self.again = layer, microbatch, where, shape.recomputed
        self._h_TD: torch.Tensor | None = h_TD
        self._out: torch.Tensor | None = None
        self._d_out: torch.Tensor | None = None
        self._d_h: torch.Tensor | None = None
        self._d_x: torch.Tensor | None = None

    def run(self, kind: Kind) -> InFlight[Any] | None:
        return self.METHODS[kind](self)

    def take_gradient(self, d_out: torch.Tensor) -> None:
        self._d_out = d_out

    def gradient(self) -> torch.Tensor | None:
        d_h, self._d_h = self._d_h, None
        return d_h

    def _segment(self, part: Part, function: Any, inputs: Sequence[torch.Tensor]) -> Segment:
        return Segment(function, inputs, self.where.deferral(part.name), again=part in self.again)

    # attention

    def attn_f(self) -> None:
        assert self._h_TD is not None
        self.attn = self._segment(Part.ATTN, self._attend, [self._h_TD])
        self._h_TD = None

    def _attend(self, h_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer.attend(h_TD, self.microbatch.positions, self.microbatch.tokens)

    def leave_input(self) -> torch.Tensor:
        (h_TD,) = self.attn.leave_inputs()
        return h_TD

    def take_input(self, h: torch.Tensor) -> None:
        self._h_TD = h

    def forget_output(self) -> None:
        self._out = None

    def attn_r(self) -> None:
        self.attn.recompute(() if self._h_TD is None else (self._h_TD,))
        self._h_TD = None

    def attn_b(self) -> None:
        (self._d_h,) = self.attn.backward([self._d_out, self._d_x])
        self._d_out = self._d_x = self._out = None

    def attn_w(self) -> None:
        self.attn.weights()

    # the feed-forward block

    def mlp_f(self) -> None:
        layer = self.layer
        self.mlp = self._segment(Part.MLP, lambda x: (layer.dense_block(x),), [self.attn.outputs[1]])

    def output(self) -> torch.Tensor:
        if self._out is None:
            self._out = self.attn.outputs[0] + self._block_output()
            self._forget()
        return self._out

    def _block_output(self) -> torch.Tensor:
        return self.mlp.outputs[0]

    def _forget(self) -> None:
        """What is recomputed need not be kept, nor what is made of it and recomputed as well."""
        if Part.ATTN in self.again:
            self.attn.outputs = ()
            self._release_inputs()

    def _release_inputs(self) -> None:
        if Part.MLP in self.again:
            self.mlp.release()

    def _again(self, segment: Segment) -> None:
        """What reads x runs again: behind attention, where that does, too."""
        segment.recompute(self.attn.outputs[1:2] if Part.ATTN in self.again else ())

    def mlp_r(self) -> None:
        self._again(self.mlp)

    def mlp_b(self) -> None:
        (self._d_x,) = self.mlp.backward([self._d_out])

    def mlp_w(self) -> None:
        self.mlp.weights()

    METHODS: ClassVar[Methods] = {
        kinds.ATTN_F: attn_f,
        kinds.ATTN_R: attn_r,
        kinds.ATTN_B: attn_b,
        kinds.ATTN_W: attn_w,
        kinds.MLP_F: mlp_f,
        kinds.MLP_R: mlp_r,
        kinds.MLP_B: mlp_b,
        kinds.MLP_W: mlp_w,
    }


class MoEPass(DensePass):
    """Attention and a Mixture of Experts."""

    tokens: Tokens
    routed: ExpertPass
    _d_y: torch.Tensor | None = None
    _shared_TD: torch.Tensor | None = None
    _shared_saved: Any
    _shared_pending: Any

    @property
    def moe(self) -> MoE:
        assert self.layer.moe is not None
        return self.layer.moe

    def _attend(self, h_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h_TD, x_TD = self.layer.attend(h_TD, self.microbatch.positions, self.microbatch.tokens)
        self.num_tokens = len(x_TD)
        x_TD, self.tokens = self.layer.to_experts(x_TD, self.microbatch.tokens)
        return h_TD, x_TD

    # the gate

    def route_f(self) -> None:
        x_TD, moe, loads = self.attn.outputs[1], self.moe, self.microbatch.loads
        self.route = self._segment(Part.ROUTE, self._choose, [x_TD])
        known = loads.add(moe, self.routing, self.tokens)
        self.call = moe.plan(self.routing, Structure(), (x_TD,), self.tokens, known, on_device=True)

    def _choose(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.routing = self.moe.gate(x_TD, self.tokens)
        return (self.routing.scores_TK,)

    def route_r(self) -> None:
        self._again(self.route)

    def route_b(self) -> None:
        (d_rows,), d_scores_TK = self.routed.input_grads()
        with torch.enable_grad():
            report = self.moe.report(self.routing, self.microbatch.loads.of(self.moe), self.tokens)
        (d_gate,) = self.route.backward([d_scores_TK], more=[(report.aux_loss, self.microbatch.aux_scale)])
        report = MoEReport(
            aux_loss=report.aux_loss.detach(), load_E=report.load_E, num_dropped=report.num_dropped
        )
        self.microbatch.reports.append(report)
        assert d_rows is not None
        self._d_x = d_rows if d_gate is None else d_rows + d_gate
        del self.routing

    def route_w(self) -> None:
        """The gate's products are small: autograd has done them in B."""

    # shared experts

    def shared_f(self) -> None:
        x_TD, shared = self.attn.outputs[1], self.moe.shared
        assert shared is not None
        self._shared_TD, self._shared_saved = shared.forward(x_TD, [len(x_TD)])
        if Part.SHARED in self.again:
            self._shared_saved = None

    def shared_r(self) -> None:
        x_TD, shared = self.attn.outputs[1], self.moe.shared
        assert shared is not None
        self._shared_saved = shared.recompute(x_TD, [len(x_TD)])

    def shared_b(self) -> None:
        shared = self.moe.shared
        assert shared is not None
        self._shared_d_x, self._shared_pending = shared.dgrad(self._gradient_of_block(), self._shared_saved)
        del self._shared_saved

    def shared_w(self) -> None:
        shared = self.moe.shared
        assert shared is not None
        for parameter, grad in zip(shared.weights, shared.wgrad([self._shared_pending]), strict=True):
            deliver(parameter, grad)
        del self._shared_pending

    # routed experts

    def dispatch_f(self) -> InFlight[None]:
        self.routed = ExpertPass(self.call, self.route.outputs[0], (self.attn.outputs[1],))
        return self.routed.dispatch()

    def mlp_f(self) -> None:
        self.routed.compute()

    def combine_f(self) -> InFlight[None]:
        return self.routed.combine()

    def _block_output(self) -> torch.Tensor:
        again = Part.MLP in self.again
        y_TD = self.routed.output(again, keep_rows=again and Part.DISPATCH not in self.again)
        if self._shared_TD is not None:
            y_TD = y_TD + self._shared_TD
            self._shared_TD = None
        if self.layer.adds_experts_as_they_are:
            return y_TD
        self._leave = Segment(lambda y: (self.layer.from_experts(y, self.num_tokens),), [y_TD])
        return self._leave.outputs[0]

    def _release_inputs(self) -> None:
        if Part.ROUTE in self.again:
            self.route.release()

    def dispatch_r(self) -> InFlight[None]:
        return self.routed.dispatch_again((self.attn.outputs[1],))

    def mlp_r(self) -> None:
        self.routed.compute_again()

    def _gradient_of_block(self) -> torch.Tensor:
        """That of the experts' sum; under tp it is moved once."""
        if self._d_y is None:
            self._d_y = self._d_out
            if not self.layer.adds_experts_as_they_are:
                (self._d_y,) = self._leave.backward([self._d_out])
            assert self._d_y is not None
            self._d_y = self._d_y.contiguous()
        return self._d_y

    def combine_b(self) -> InFlight[None]:
        return self.routed.combine_back(self._gradient_of_block())

    def mlp_b(self) -> None:
        self.routed.compute_back()

    def dispatch_b(self) -> InFlight[None]:
        return self.routed.dispatch_back()

    def mlp_w(self) -> None:
        self.routed.weights()

    def attn_b(self) -> None:
        if self.moe.shared is not None:
            assert self._d_x is not None
            self._d_x = self._d_x + self._shared_d_x
            del self._shared_d_x
        self._d_y = None
        super().attn_b()

    METHODS: ClassVar[Methods] = {
        **DensePass.METHODS,
        kinds.ATTN_B: attn_b,
        kinds.ROUTE_F: route_f,
        kinds.ROUTE_R: route_r,
        kinds.ROUTE_B: route_b,
        kinds.ROUTE_W: route_w,
        kinds.SHARED_F: shared_f,
        kinds.SHARED_R: shared_r,
        kinds.SHARED_B: shared_b,
        kinds.SHARED_W: shared_w,
        kinds.DISPATCH_F: dispatch_f,
        kinds.DISPATCH_R: dispatch_r,
        kinds.DISPATCH_B: dispatch_b,
        kinds.MLP_F: mlp_f,
        kinds.MLP_R: mlp_r,
        kinds.MLP_B: mlp_b,
        kinds.MLP_W: mlp_w,
        kinds.COMBINE_F: combine_f,
        kinds.COMBINE_B: combine_b,
    }


@dataclass(frozen=True)
class LayerParts:
    """A layer that offers its parts, as `pipeline/stage` wants it."""

    layer: TransformerLayer

    def describe(self) -> LayerShape:
        """The layer as a schedule sees it."""
        moe = self.layer.moe
        return LayerShape(moe=moe is not None, shared=moe is not None and moe.shared is not None)

    def begin(
        self, h_TD: torch.Tensor, microbatch: MicrobatchState, where: Where, shape: LayerShape
    ) -> LayerPass:
        kind = DensePass if self.layer.moe is None else MoEPass
        return kind(self.layer, h_TD, microbatch, where, shape)
