"""What every op of a step costs, from the sizes of a model, the axes it is laid out on and the hardware.

A table of costs (`sim/durations`) knows one time for each kind of op. In a real model layers differ: the
first are dense, the last has the head behind it, stages hold different numbers of them. So each op is
computed for itself:

    compute     its products, over the tp ranks that share them; where a program does not list them, also
                the collectives of tp around them
    exchange    rows to the ranks that share the experts, a chunk of them at a time
    launches    what travels for each token beside rows, or a few numbers for each expert
    transfers   the activations of one microbatch
    buckets     gradients there and weights back, less the rank's own part; moments and weights of an update
    copies      state, inputs, gradients, weights between the host's memory and the device, both ways at once

One rate and one link: for a machine whose rate and wire have just been measured (`train/run/resolve_auto`),
and for shares of what was measured (`train/observe/trace_file`). A cluster is `sim/cluster_costs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeclipse.cost.hardware import LINKS, Device, Link
from moeclipse.cost.layer_seconds import UPDATE_BYTES
from moeclipse.cost.model import Costs, LayerWork
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import COPIES, ENDS, LAUNCHES, TRANSFERS, Form, Part
from moeclipse.schedule.launch import HostedLaunch, StepShape
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import LayerShape, PipelineShape
from moeclipse.schedule.whole_step import buckets_of, hosted_launch

CUT_OVER_TP = {Part.ATTN: 2, Part.SHARED: 2, Part.MLP: 2, Part.HEAD: 1}
"""Collectives of tp around the products of a part, in each direction; of MLP in dense layers alone."""
GRADIENT_BYTES = 4.0
"""Gradients are summed in float32."""
COUNT_BYTES = 8.0


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One microbatch of a run as the ranks of one data index see it."""

    layer: LayerWork
    """A layer with experts; its tokens are those of one data index."""
    dense_width: int = 0
    """Hidden width of layers without experts."""
    vocab: int = 0
    """Rows of the head."""
    dp: int = 1
    ep: int = 1
    tp: int = 1

    def flops(self, part: Part, shape: LayerShape) -> float:
        """Of a part's forward, on one of the tp ranks."""
        T, D = self.layer.tokens, self.layer.d_model
        if part is Part.HEAD:
            whole = 2.0 * T * D * self.vocab
        elif part is Part.MLP and not shape.moe:
            whole = 6.0 * T * D * self.dense_width
        else:
            whole = self.layer.forward_flops()[part.name]
        return whole / (1 if part is Part.ROUTE else self.tp)

    def parameters(self, shape: LayerShape) -> tuple[float, float]:
        """(dense ones, of experts) of a layer on a rank; these are summed over dp, those over dp x ep."""
        work, D = self.layer, self.layer.d_model
        dense = float(work.attn_params) + (self.vocab * D if shape.head else 0)
        if not shape.moe:
            return (dense + 3.0 * D * self.dense_width) / self.tp, 0.0
        dense += 3.0 * D * work.shared_width
        experts = 3.0 * D * work.d_ff * work.num_experts
        return dense / self.tp + D * work.num_experts, experts / (self.ep * self.tp)


def moved_weights(op: Op, layer: LayerShape) -> float:
    """Bytes of experts' weights on either way."""
    return layer.weight_bytes if op.kind.form is Form.FETCH else layer.stored_bytes


class StepCosts:
    """Seconds of the ops of one program."""

    def __init__(
        self, work: StepWork, device: Device, link: Link, host_link: Link = LINKS["host-copies"]
    ) -> None:
        """`host_link`: between the host's memory and the device."""
        self.work, self.device, self.link, self.host_link = work, device, link, host_link
        self.rate = device.flops * device.efficiency
        self.row_bytes = work.layer.d_model * work.layer.row_bytes_per_value

    @property
    def value_bytes(self) -> float:
        """Of an activation, or of a weight."""
        return self.work.layer.row_bytes_per_value

    @property
    def table_parameters(self) -> float:
        """Of the embedding, or of the head, on one rank."""
        return self.work.vocab * self.work.layer.d_model / self.work.tp

    def parameters(self, _number: int, shape: LayerShape) -> tuple[float, float]:
        """(dense ones, of experts) of a layer on a rank."""
        return self.work.parameters(shape)

    def costs(self, _program: Program | None = None) -> Costs:
        """What goes with the durations: host and launch."""
        name = f"{self.device.name} over {self.link.name}"
        inline = self.device.name == "cpu"
        return Costs(name=name, seconds={}, launch=self.device.launch, inline_compute=inline)

    def durations(self, program: Program) -> list[list[float]]:
        """Per rank, per op, as `simulate` takes them."""
        shape = program.pipeline()
        known: dict[tuple[object, ...], float] = {}
        found: list[list[float]] = []
        for ops in program.ranks:
            found.append([])
            for op in ops:
                layers = shape.layers[op.stage or 0]
                layer = None if op.layer is None else layers[op.layer]
                if op.kind in LAUNCHES or op.kind in ENDS:
                    key: tuple[object, ...] = (op.kind, op.stage, op.layer, op.step, op.chunks)
                else:
                    key = (op.kind, op.chunks, layer, layers if op.kind is kinds.REDUCE else None)
                if key not in known:
                    known[key] = self._of(shape, op, layer, layers)
                found[-1].append(known[key])
        return found

    def _of(
        self, shape: PipelineShape, op: Op, layer: LayerShape | None, layers: tuple[LayerShape, ...]
    ) -> float:
        if shape.step is None:
            return self._seconds(op, layer, layers, lists_tensor=False)
        if op.kind in LAUNCHES:
            return self._launch(shape.step, hosted_launch(shape, op), op.chunks)
        if op.kind.part is Part.INPUT:
            assert layer is not None
            return self.host_link.seconds(layer.host_bytes)
        if op.kind.part is Part.WEIGHTS:
            assert layer is not None
            return self.host_link.seconds(moved_weights(op, layer))
        if op.kind in ENDS:
            return self._end(shape, shape.step, op)
        return self._seconds(op, layer, layers, lists_tensor=True)

    def _launch(self, step: StepShape, launch: HostedLaunch, chunks: int) -> float:
        num_ranks = step.size_of(launch.axis)
        if num_ranks == 1:
            return 0.0
        others = (num_ranks - 1) / num_ranks
        if not launch.width:
            return self.link.seconds(COUNT_BYTES * self.work.layer.num_experts * (num_ranks - 1))
        moved = self.work.layer.tokens * launch.width * self.work.layer.row_bytes_per_value * others
        if launch.axis == "experts":  # each tp rank sends for its part of the tokens
            moved /= self.work.tp
        return self.link.seconds(moved / chunks)

    def _end(self, shape: PipelineShape, step: StepShape, op: Op) -> float:
        """Buckets by their bytes; what else ends a step is a few numbers, or a tied embedding."""
        if op.kind.part not in (Part.BUCKET, Part.GRAD):
            alone = op.kind is not kinds.LOADS_SUM and step.copies * shape.placement.num_ranks == 1
            tied = self.table_parameters if op.kind is kinds.TIED_SUM else 0
            return 0.0 if alone else self.link.seconds(GRADIENT_BYTES * tied)
        bucket = buckets_of(shape, step, op.stage or 0)[op.step or 0]
        if op.kind in COPIES:
            moved = bucket.grad_bytes if op.kind.part is Part.GRAD else bucket.host_bytes
            return self.host_link.seconds(moved)
        num_ranks = step.size_of(bucket.axis)
        if op.kind is kinds.BUCKET_UPDATE:
            num_parameters = bucket.num_bytes / GRADIENT_BYTES / num_ranks
            return UPDATE_BYTES * num_parameters / self.device.memory_bandwidth
        if num_ranks == 1:
            return 0.0
        share = bucket.num_bytes * (num_ranks - 1) / num_ranks
        back = self.work.layer.row_bytes_per_value / GRADIENT_BYTES if op.kind is kinds.BUCKET_GATHER else 1
        return self.link.seconds(share * back)

    def _seconds(
        self, op: Op, layer: LayerShape | None, layers: tuple[LayerShape, ...], *, lists_tensor: bool
    ) -> float:
        if op.kind in TRANSFERS:
            return self.link.seconds(self.work.layer.tokens * self.row_bytes / self.work.tp)
        if op.kind is kinds.REDUCE:
            return self._reduction(layers)
        assert layer is not None, f"{op} is no op of a layer; expand the program first"
        if op.kind.part in (Part.DISPATCH, Part.COMBINE):
            if self.work.ep * self.work.tp == 1:
                return 0.0
            rows = self.work.layer.exchange_bytes(self.work.ep * self.work.tp) / self.work.tp
            return self.link.seconds(rows / op.chunks)
        return self._compute(op, layer, lists_tensor)

    def _compute(self, op: Op, layer: LayerShape, lists_tensor: bool) -> float:
        part, form = op.kind.part, op.kind.form
        core = self.work.layer.attn_core_flops() / self.work.tp if part is Part.ATTN else 0.0
        extra = {Form.B: core, Form.W: -core}.get(form, 0.0)
        seconds = (self.work.flops(part, layer) + extra) / self.rate
        around = self.work.tp > 1 and not lists_tensor
        if around and form is not Form.W and not (part is Part.MLP and layer.moe):
            moved = self.work.layer.tokens * self.row_bytes * (self.work.tp - 1) / self.work.tp
            seconds += CUT_OVER_TP.get(part, 0) * self.link.seconds(moved)
        return seconds / op.chunks

    def _reduction(self, layers: tuple[LayerShape, ...]) -> float:
        seconds = 0.0
        sizes = [self.work.parameters(layer) for layer in layers]
        everywhere, replicas = self.work.dp * self.work.ep, self.work.dp
        for number, ranks in ((sum(d for d, _ in sizes), everywhere), (sum(e for _, e in sizes), replicas)):
            if ranks > 1 and number:
                seconds += self.link.seconds(2 * number * GRADIENT_BYTES * (ranks - 1) / ranks)
        return seconds
