"""The step of a run as its configuration lays it out, and how long the simulator says it takes.

The program is the one that the run would execute: its stages, even or as listed, its dense first layers,
the head, chunks and recompute, all that travels beside rows, and the end of the step with buckets as large as
its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moeclipse.cost.model import Costs
from moeclipse.pipeline.overlap import lay_out, make_program
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.launch import BucketShape, StepShape
from moeclipse.schedule.state_travel import spread
from moeclipse.sim.compare import Answer
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise
from moeclipse.sim.step_costs import GRADIENT_BYTES, StepCosts
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.state_bytes import each_element
from moeclipse.train.predict.step_program import estimated_buckets, shapes_of_run, updates_in_backward
from moeclipse.train.step.pipelined import chunks_for

HELD = {2.0: torch.bfloat16, 8.0: torch.float64}
"""Types of weights by their bytes."""


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A run's configuration with its axes as numbers, and what its ops cost."""

    config: TrainConfig
    dp: int
    ep: int
    costs: Costs | None
    """A table; None: from sizes."""
    step_costs: StepCosts
    memory_limit: float | None = None
    """Most activations a rank may hold, in those of a layer for one microbatch."""
    host_share: float | None = None
    """Of optimizer state that lies on the host; None: as the configuration says, where it names one."""

    @property
    def title(self) -> str:
        parallel, pipeline = self.config.parallel, self.config.pipeline
        axes = f"pp {parallel.pp} x dp {self.dp} x ep {self.ep} x tp {parallel.tp}"
        over = f", overlap {pipeline.overlap}" if pipeline.overlaps else ""
        again = f", recompute {pipeline.recomputed}" if pipeline.recomputed != "off" else ""
        priced = (self.costs or self.step_costs.costs()).name
        microbatches = self.config.optim.accumulate
        layers = self.config.model.num_layers
        return f"{axes}, {layers} layers, {microbatches} microbatches, costs {priced}{over}{again}"

    def answer(self, schedule: str) -> Answer:
        """The step under one schedule; ConfigError or ScheduleError where the run could not take it."""
        verified, name = self.verified(schedule)
        if self.memory_limit is not None:
            verified = verify(verified.program, self.memory_limit)
        if self.costs is not None:
            result = simulate(verified, self.costs)
        else:
            costs, durations = self.step_costs.costs(), self.step_costs.durations(verified.program)
            result = simulate(verified, costs, durations)
        placement = verified.program.pipeline().placement
        return Answer(
            name=name,
            result=result,
            summary=summarise(result),
            model_copies=placement.num_chains,
            stages_per_rank=max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks)),
        )

    def verified(self, schedule: str) -> tuple[Verified, str]:
        config = self.config
        pipeline = replace(config.pipeline, schedule=schedule)  # type: ignore[arg-type]
        pp, microbatches = config.parallel.pp, config.optim.accumulate
        layout = lay_out(pipeline, config.model.num_layers, pp, microbatches)
        layers, step = shapes_of_run(config, (self.dp, self.ep, config.parallel.tp), layout)
        work, tied = self.step_costs.work, config.model.tie_embeddings
        table = work.vocab * work.layer.d_model / work.tp
        buckets = estimated_buckets(
            layout, list(map(work.parameters, layers)), (table, 0.0 if tied else table), tied=tied
        )
        apart = layout.rank_of[0] != layout.rank_of[-1]
        by_layer = updates_in_backward(config, self.dp * self.ep * config.parallel.tp * pp, pp)
        placed = tuple(self._placed(mine, step) for mine in buckets)
        step = replace(step, buckets=placed, tied=tied and apart, by_layer=by_layer)
        step = replace(step, slots=config.memory.buffers)
        chunks = chunks_for(config, self.dp * self.ep)
        return make_program(pipeline, layout, layers, pp, microbatches, chunks, step=step), layout.schedule

    def _placed(self, buckets: Sequence[BucketShape], step: StepShape) -> tuple[BucketShape, ...]:
        """With the state that lies on the host; a layer is what fills a bucket."""
        memory, width = self.config.memory, self.step_costs.work.layer.row_bytes_per_value
        given = memory.share if memory.place == "host" else 0.0
        share = given if self.host_share is None else self.host_share
        each = each_element(self.config.optim, memory.states, HELD.get(width, torch.float32))
        names = spread([(bucket.name, bucket.num_bytes) for bucket in buckets], share) if each else ()
        return tuple(
            bucket._replace(
                layer=bucket.name.partition(".")[0],
                host_bytes=each * bucket.num_bytes / GRADIENT_BYTES / step.size_of(bucket.axis)
                if bucket.name in names
                else 0.0,
            )
            for bucket in buckets
        )
