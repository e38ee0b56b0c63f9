"""What every op of a step costs on a cluster: kernels as a roofline, each axis over the links it crosses.

The prices are those of `moeclipse plan` (`cost/layer_seconds`, `cost/cluster`), op by op instead of action by
action:

    compute     the parts of a layer, of the rows of a chunk, as kernels take inside a step
    exchange    rows over near and far links; beside them products are slower (`contention`)
    launches    what travels for each token beside rows, or a few numbers for each expert
    transfers   activations to the next stage, over the link that its stride asks for
    buckets     gradients there and weights back, memory passed over by an update
    copies      state, inputs, gradients and weights between the host's memory and the device
    host        a layer takes no less than its launches

`sim/step_costs` does the same with one rate and one link: for a machine that has just been measured.
"""

from __future__ import annotations

from dataclasses import replace

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.layer_seconds import OURS, UPDATE_BYTES, MicrobatchWork, Seconds, Software, slower
from moeclipse.cost.model import Costs
from moeclipse.schedule import kinds
from moeclipse.schedule.kinds import COPIES, ENDS, LAUNCHES, TRANSFERS, Form, Part
from moeclipse.schedule.launch import HostedLaunch, StepShape
from moeclipse.schedule.op import Op, Program
from moeclipse.schedule.shape import LayerShape, PipelineShape
from moeclipse.schedule.whole_step import END_AXES, buckets_of, hosted_launch
from moeclipse.sim.step_costs import COUNT_BYTES, GRADIENT_BYTES, moved_weights

FORM = {Form.F: 0, Form.R: 0, Form.B: 1, Form.W: 2}
"""Which of `Seconds` a form takes; recompute is forward once more, or a part of it."""


class ClusterCosts:
    """Seconds of the ops of one program; `work` is one microbatch of one data index."""

    def __init__(
        self, work: MicrobatchWork, software: Software = OURS, update_bytes: float = UPDATE_BYTES
    ) -> None:
        """`update_bytes`: that an update moves of a parameter, in the forms that its state has."""
        self.update_bytes = update_bytes
        self.work = replace(work, tensor_inside=False)  # gathers over tp are ops of a whole step
        self.model, self.cluster, self.software = work.model, work.cluster, software
        self._cut: dict[int, MicrobatchWork] = {1: self.work}
        self._parts: dict[tuple[Part, bool, int, int], Seconds] = {}

    @property
    def name(self) -> str:
        cluster = self.cluster
        between = "" if cluster.far == cluster.near else f", {cluster.far.name} between nodes"
        return f"{cluster.device.name}, {cluster.gpus_per_node} a node over {cluster.near.name}{between}"

    @property
    def value_bytes(self) -> float:
        """Of an activation, or of a weight."""
        return self.work.value_bytes

    @property
    def table_parameters(self) -> float:
        """Of the embedding, or of the head, on one rank."""
        return self.model.table_parameters / self.work.tp

    def parameters(self, number: int, shape: LayerShape) -> tuple[float, float]:
        """Trained ones, (dense, of experts), of a layer on a rank: summed over dp x ep, and over dp."""
        experts = self.model.trained_experts(number) / self.work.expert_ranks
        return self.model.trained_dense(number) / self.work.tp, experts if shape.moe else 0.0

    def costs(self, program: Program | None = None) -> Costs:
        """What goes with the durations. A host's time for a layer is shared by the ops of `program`."""
        device, rate = self.cluster.device, self.cluster.rate_beside_exchange
        launch = device.launch
        if program is not None and device.name != "cpu":
            shape = program.pipeline()
            passes = sum(map(len, shape.layers)) * shape.num_microbatches / shape.placement.num_chains
            of_layers = sum(op.layer is not None for ops in program.ranks for op in ops)
            launch = self.software.host_s * passes / max(of_layers, 1)
        return Costs(
            name=self.name,
            seconds={},
            launch=launch,
            inline_compute=device.name == "cpu",
            contention={("compute", "a2a"): rate} if rate < 1 else {},
        )

    def durations(self, program: Program) -> list[list[float]]:
        """Per rank, per op, as `simulate` takes them."""
        shape = program.pipeline()
        if shape.step is None:
            raise ScheduleError("a cluster prices whole steps; expand the program with a step")
        first = shape.first_layers
        known: dict[tuple[object, ...], float] = {}
        found: list[list[float]] = []
        for ops in program.ranks:
            row = []
            for op in ops:
                key = (op.kind, op.stage, op.layer, op.step, op.chunks)
                if key not in known:
                    known[key] = self._seconds(shape, shape.step, op, first)
                row.append(known[key])
            found.append(row)
        return found

    def _seconds(self, shape: PipelineShape, step: StepShape, op: Op, first: list[int]) -> float:
        if op.kind in TRANSFERS:
            return self.work.transfer(step.copies)
        if op.kind in LAUNCHES:
            return self._launch(step, hosted_launch(shape, op), op.chunks)
        if op.kind in ENDS:
            return self._end(shape, step, op)
        assert op.stage is not None
        assert op.layer is not None, f"{op} is no op of a layer; expand the program first"
        part, form, work = op.kind.part, op.kind.form, self._chunk(op.chunks)
        if part is Part.INPUT:
            return self.cluster.host.seconds(shape.layers[op.stage][op.layer].host_bytes)
        if part is Part.WEIGHTS:
            return self.cluster.host.seconds(moved_weights(op, shape.layers[op.stage][op.layer]))
        if part is Part.DISPATCH or part is Part.COMBINE:
            # gradients of combine's rows leave as dispatch's do, and the other way round
            to_experts = (part is Part.DISPATCH) is (form is not Form.B)
            return work.dispatch() if to_experts else work.combine()
        layer = shape.layers[op.stage][op.layer]
        number = first[op.stage] + op.layer
        again = form is Form.R and part is Part.MLP and layer.moe
        share = self.software.again_on(self.cluster) if again else 1.0
        return share * self._part(part, layer.moe, number, op.chunks)[FORM[form]]

    def _part(self, part: Part, moe: bool, number: int, chunks: int) -> Seconds:
        apart = part is Part.ATTN or bool(self.model.trained)
        key = (part, moe, number if apart else 0, chunks)
        if key not in self._parts:
            work = self._chunk(chunks)
            alone = {
                Part.ATTN: lambda: work.attention(number),
                Part.ROUTE: lambda: work.route(number),
                Part.SHARED: lambda: work.shared(number),
                Part.MLP: lambda: work.experts(number) if moe else work.dense(number),
                Part.HEAD: work.head,
            }[part]()
            self._parts[key] = slower(alone, self.software.inside(self.cluster))
        return self._parts[key]

    def _chunk(self, chunks: int) -> MicrobatchWork:
        if chunks not in self._cut:
            self._cut[chunks] = replace(self.work, tokens=max(self.work.tokens // chunks, 1))
        return self._cut[chunks]

    def _launch(self, step: StepShape, launch: HostedLaunch, chunks: int) -> float:
        size, stride = self._axis(step, launch.axis)
        if size == 1:
            return 0.0
        if not launch.width:
            return self.cluster.collective(COUNT_BYTES * self.model.experts.num_experts * size, size, stride)
        work, each = self._chunk(chunks), launch.width * self.value_bytes
        if launch.axis == "experts":  # each tp rank sends for its part of the tokens
            return self.cluster.exchange(work.tokens / work.tp, each, self.model.experts, size)
        return self.cluster.collective(work.tokens * each, size, stride)

    def _end(self, shape: PipelineShape, step: StepShape, op: Op) -> float:
        """Buckets by their bytes; what else ends a step is a few numbers, or a tied embedding."""
        if op.kind.part not in (Part.BUCKET, Part.GRAD):
            size, stride = self._axis(step, END_AXES[op.kind], shape.placement.num_ranks)
            tied = self.table_parameters if op.kind is kinds.TIED_SUM else 0.0
            return self.cluster.collective(GRADIENT_BYTES * tied, size, stride)
        bucket = buckets_of(shape, step, op.stage or 0)[op.step or 0]
        if op.kind in COPIES:
            moved = bucket.grad_bytes if op.kind.part is Part.GRAD else bucket.host_bytes
            return self.cluster.host.seconds(moved)
        size, stride = self._axis(step, bucket.axis, shape.placement.num_ranks)
        if op.kind is kinds.BUCKET_UPDATE:
            owned = bucket.num_bytes / GRADIENT_BYTES / size
            return self.work.kernels.stream(self.update_bytes * owned)
        share = self.value_bytes / GRADIENT_BYTES if op.kind is kinds.BUCKET_GATHER else 1.0
        return self.cluster.collective(share * bucket.num_bytes, size, stride)

    @staticmethod
    def _axis(step: StepShape, axis: str, places: int = 1) -> tuple[int, int]:
        """(ranks, how far they lie apart)."""
        members = step.members(axis, 0, places, step.copies)
        return len(members), members[1] - members[0] if len(members) > 1 else 1
