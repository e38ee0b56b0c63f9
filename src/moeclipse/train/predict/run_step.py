"""The step of a run as its configuration lays it out: how long the simulator says it takes, and its bytes.

The program is the one that the run would execute: its stages, even or as listed, its dense first layers,
the head, chunks and recompute, all that travels beside rows, and the end of the step with buckets as large as
its layers. Bytes are those of `moeclipse plan` (`cost/step_bytes`), layer by layer in simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import Costs
from moeclipse.cost.sizes import ModelSizes
from moeclipse.cost.step_bytes import Sharing, StateBytes, standing
from moeclipse.pipeline.config import PipelineConfig
from moeclipse.pipeline.overlap import StageLayout, lay_out, make_program
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.grad_travel import turns_of
from moeclipse.schedule.kinds import COMPUTE
from moeclipse.schedule.launch import BucketShape, StepShape
from moeclipse.schedule.op import Program
from moeclipse.schedule.shape import Activation, LayerShape
from moeclipse.schedule.state_travel import spread
from moeclipse.sim.compare import Answer
from moeclipse.sim.engine import Simulation, simulate
from moeclipse.sim.measure import summarise
from moeclipse.sim.step_costs import GRADIENT_BYTES
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.buckets import summed_type
from moeclipse.train.optim.memory_config import activation_problems
from moeclipse.train.predict.state_bytes import each_element
from moeclipse.train.predict.step_program import (
    estimated_buckets,
    estimated_weights,
    input_buffers,
    shapes_of_run,
    weights_saved,
    when_updated,
    with_host_inputs,
    with_host_weights,
    with_weight_ring,
)
from moeclipse.train.step.pipelined import chunks_for

HELD = {2.0: torch.bfloat16, 8.0: torch.float64}
"""Types of weights by their bytes."""
GIB = 2.0**30


class StepPrices(Protocol):
    """Seconds of ops (`sim/cluster_costs`, `sim/step_costs`)."""

    @property
    def table_parameters(self) -> float: ...
    @property
    def value_bytes(self) -> float: ...
    def parameters(self, number: int, shape: LayerShape, /) -> tuple[float, float]: ...
    def costs(self, program: Program | None = None, /) -> Costs: ...
    def durations(self, program: Program) -> list[list[float]]: ...


@dataclass(frozen=True, kw_only=True)
class RunBytes:
    """What the bytes of a step follow from."""

    model: ModelSizes
    sharing: Sharing
    state: StateBytes
    tokens: float
    """Of one microbatch of one data index."""
    width: float

    def shaped(self, layers: Sequence[LayerShape], pipeline: PipelineConfig) -> list[LayerShape]:
        """Layers with what they keep."""
        found = []
        for index, layer in enumerate(layers):
            again = pipeline.recomputed if pipeline.runs_again(index) else "off"
            part = self.model.training(index)
            kept = self.sharing.parts(self.model, layer.moe, self.tokens, self.width, again, part)
            found.append(replace(layer, activation=Activation(**kept._asdict())))
        return found

    def peaks(self, layout: StageLayout, kept: Sequence[float], *, program: bool) -> tuple[float, ...]:
        """Of each rank of the pipeline, all together; `kept` are activations at their most."""
        one = layout.first_copy
        sharing = replace(self.sharing, dp=self.sharing.dp * layout.num_chains)
        return tuple(
            most
            + standing(
                self.model,
                sharing,
                self.state,
                one.stages,
                [stage % len(one.stages) for stage in layout.held_by(place)],
                self.tokens,
                self.width,
                program=program,
            )
            for place, most in enumerate(kept)
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Means of the steps that a run has taken, in seconds."""

    step: float
    compute: float
    communication: float
    window: str
    schedule: str = ""
    """That they had; empty: the one of the configuration."""


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A run's configuration with its axes as numbers, and what its ops cost."""

    config: TrainConfig
    dp: int
    ep: int
    costs: Costs | None
    """A table; None: from sizes."""
    step_costs: StepPrices
    bytes: RunBytes | None = None
    memory_limit: float | None = None
    """Most bytes that a rank may take; without `bytes`, activations of a layer for one microbatch."""
    measured: Measured | None = None
    """Compute and communication take so long together under the schedule that ran, whatever sizes say."""
    host_share: float | None = None
    """Of optimizer state that lies on the host; None: as the configuration says, where it names one."""

    @property
    def title(self) -> str:
        parallel, pipeline = self.config.parallel, self.config.pipeline
        axes = f"pp {parallel.pp} x dp {self.dp} x ep {self.ep} x tp {parallel.tp}"
        over = f", overlap {pipeline.overlap}" if pipeline.overlaps else ""
        again = f", recompute {pipeline.recomputed}" if pipeline.recomputed != "off" else ""
        priced = "as measured" if self.measured else (self.costs or self.step_costs.costs()).name
        microbatches = self.config.optim.accumulate
        many = "microbatch" if microbatches == 1 else "microbatches"
        layers = self.config.model.num_layers
        return f"{axes}, {layers} layers, {microbatches} {many}, costs {priced}{over}{again}"

    def answer(self, schedule: str) -> Answer:
        """The step under one schedule; ConfigError or ScheduleError where the run could not take it."""
        verified, layout = self.verified(schedule)
        if self.memory_limit is not None and self.bytes is None:
            verified = verify(verified.program, self.memory_limit)
        result = self._simulated(verified)
        summary = summarise(result)
        placement = verified.program.pipeline().placement
        peaks: tuple[float, ...] = ()
        if self.bytes is not None:
            pp, tp = self.config.parallel.pp, self.config.parallel.tp
            program = self.config.runs_program(pp, pp * self.dp * self.ep * tp)
            peaks = self.bytes.peaks(layout, summary.peak, program=program)
            step = verified.program.pipeline().step
            assert step is not None
            on_host = [sum(bucket.host_bytes for bucket in mine) for mine in step.buckets]
            weights = weights_saved(self.config, self.step_costs.value_bytes)  # which one rank has alone
            peaks = tuple(size - away - weights for size, away in zip(peaks, on_host, strict=True))
            self._refuse_large(layout.schedule, peaks, schedule)
        return Answer(
            name=layout.schedule,
            result=result,
            summary=summary,
            model_copies=placement.num_chains,
            stages_per_rank=max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks)),
            bytes_of=peaks,
        )

    def _refuse_large(self, name: str, peaks: Sequence[float], schedule: str) -> None:
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank])
        if self.memory_limit is not None and peaks[worst] > self.memory_limit:
            raise ScheduleError(
                f"{name}: rank {worst} of the pipeline takes {peaks[worst] / GIB:.1f} GiB at its peak, more "
                f"than the {self.memory_limit / GIB:g} allowed{self._with_inputs_away(schedule)}"
            )

    def _with_inputs_away(self, schedule: str) -> str:
        """What it would take with inputs of layers on the host, where these may go."""
        config = self.config
        pipeline = replace(config.pipeline, schedule=schedule)  # type: ignore[arg-type]
        if config.memory.activations != "auto" or list(activation_problems(pipeline, config.model)):
            return ""
        away = replace(config, memory=replace(config.memory, activations="host"))
        answer = replace(self, config=away, memory_limit=None).answer(schedule)
        peak, step = max(answer.bytes_of) / GIB, answer.summary.makespan
        return f"; with memory.activations = 'host' {peak:.1f} GiB, in {step:.3g} s"

    def _simulated(self, verified: Verified) -> Simulation:
        if self.costs is not None:
            return simulate(verified, self.costs)
        costs = self.step_costs.costs(verified.program)
        durations = self.step_costs.durations(verified.program)
        if self.measured is None:
            return simulate(verified, costs, durations)
        own, _ = self.verified(self.measured.schedule or self.config.pipeline.schedule)
        scale = scales(own.program, self.step_costs.durations(own.program), self.measured)
        scaled = [
            [seconds * scale[op.lane == COMPUTE] for op, seconds in zip(ops, row, strict=True)]
            for ops, row in zip(verified.program.ranks, durations, strict=True)
        ]
        # What the host takes, and what lanes take from each other, is in what was measured.
        return simulate(verified, replace(costs, launch=0.0, contention={}), scaled)

    def verified(self, schedule: str) -> tuple[Verified, StageLayout]:
        config = self.config
        pipeline = replace(config.pipeline, schedule=schedule)  # type: ignore[arg-type]
        pp, microbatches = config.parallel.pp, config.optim.accumulate
        layout = lay_out(pipeline, config.model.num_layers, pp, microbatches)
        axes = (self.dp, self.ep, config.parallel.tp)
        layers, step = shapes_of_run(config, axes, layout)
        layers = with_host_inputs(layers, config, axes, self.step_costs.value_bytes)
        layers = with_host_weights(layers, estimated_weights(config, self.step_costs.value_bytes))
        prices, tied = self.step_costs, config.model.tie_embeddings
        if self.bytes is not None:
            layers = self.bytes.shaped(layers, pipeline)
        sizes = [prices.parameters(number, layer) for number, layer in enumerate(layers)]
        table = prices.table_parameters
        buckets = estimated_buckets(layout, sizes, (table, 0.0 if tied else table), tied=tied)
        apart = layout.rank_of[0] != layout.rank_of[-1]
        placed = tuple(self._placed(mine, step) for mine in buckets)
        step = replace(step, buckets=placed, tied=tied and apart, slots=config.memory.buffers)
        step = with_weight_ring(replace(step, input_slots=input_buffers(config)), config)
        step = when_updated(step, config, self.dp * self.ep * config.parallel.tp * pp, pp)
        chunks = chunks_for(config, self.dp * self.ep)
        return make_program(pipeline, layout, layers, pp, microbatches, chunks, step=step), layout

    def _placed(self, buckets: Sequence[BucketShape], step: StepShape) -> tuple[BucketShape, ...]:
        """With the state that lies on the host; a layer is what fills a bucket."""
        memory, width = self.config.memory, self.step_costs.value_bytes
        given = memory.share if memory.place == "host" else 0.0
        share = given if self.host_share is None else self.host_share
        each = each_element(self.config.optim, memory.states, HELD.get(width, torch.float32))
        at_home = [bucket.name.partition(".") for bucket in buckets]
        keys = [
            (axis, b.num_bytes) if axis else None for (_, _, axis), b in zip(at_home, buckets, strict=True)
        ]
        leave = memory.main_grad == "host"
        turns = turns_of(keys, memory.buffers) if leave else [-1] * len(buckets)
        grad = summed_type(self.config.optim.main_grad, HELD.get(width, torch.float32)).itemsize
        names = spread([(bucket.name, bucket.num_bytes) for bucket in buckets], share) if each else ()
        stored = any(trained for _, trained in estimated_weights(self.config, width).values())
        return tuple(
            bucket._replace(
                layer=bucket.name.partition(".")[0],
                host_bytes=each * bucket.num_bytes / GRADIENT_BYTES / step.size_of(bucket.axis)
                if bucket.name in names
                else 0.0,
                turn=turn,
                grad_bytes=grad * bucket.num_bytes / GRADIENT_BYTES,
                weights=stored and bucket.axis == "replicas",
            )
            for bucket, turn in zip(buckets, turns, strict=True)
        )


def scales(program: Program, durations: list[list[float]], measured: Measured) -> dict[bool, float]:
    """Factors on ops of compute (True) and on transfers, so that a rank's sums are the measured ones."""
    found = {}
    for computes, wanted in ((True, measured.compute), (False, measured.communication)):
        total = sum(
            seconds
            for ops, row in zip(program.ranks, durations, strict=True)
            for op, seconds in zip(ops, row, strict=True)
            if (op.lane == COMPUTE) is computes
        )
        found[computes] = wanted * len(program.ranks) / total if total else 1.0
    return found
