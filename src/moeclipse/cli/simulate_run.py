"""`moeclipse simulate --config FILE`: the step of a run as its configuration lays it out.

    moeclipse simulate --config runs/mine/config.toml --device h200 --link infiniband
    moeclipse simulate --config mine.toml --ranks 16 --compare

The program is the one that the run would execute: its stages, even or as listed, its dense first layers,
the head, chunks and recompute, all that travels beside rows, and the end of the step with buckets as large as
its layers. What ops cost follows from the model's sizes and the hardware (`sim/step_costs`), or from a table
(--costs), in which what it does not name of these is free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.cost.file import load_costs
from moeclipse.cost.hardware import device, link
from moeclipse.cost.model import Costs
from moeclipse.pipeline.config import Schedule
from moeclipse.pipeline.overlap import lay_out, make_program
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified
from moeclipse.sim.compare import Answer
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise
from moeclipse.sim.step_costs import StepCosts
from moeclipse.train.config import TrainConfig
from moeclipse.train.pipelined import chunks_for
from moeclipse.train.presets import load
from moeclipse.train.step_program import estimated_buckets, shapes_of_run
from moeclipse.train.step_sizes import step_work, value_bytes

RUN_SCHEDULES = ("pp1", *(name for name in get_args(Schedule) if name != "auto"))
"""Schedules that a run can take."""


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A run's configuration with its axes as numbers, and what its ops cost."""

    config: TrainConfig
    dp: int
    ep: int
    costs: Costs | None
    """A table; None: from sizes."""
    step_costs: StepCosts

    @property
    def title(self) -> str:
        parallel, pipeline = self.config.parallel, self.config.pipeline
        axes = f"pp {parallel.pp} x dp {self.dp} x ep {self.ep} x tp {parallel.tp}"
        over = f", overlap {pipeline.overlap}" if pipeline.overlap != "off" else ""
        again = f", recompute {pipeline.recompute}" if pipeline.recompute != "off" else ""
        priced = (self.costs or self.step_costs.costs()).name
        microbatches = self.config.optim.accumulate
        layers = self.config.model.num_layers
        return f"{axes}, {layers} layers, {microbatches} microbatches, costs {priced}{over}{again}"

    def answer(self, schedule: str) -> Answer:
        """The step under one schedule; ConfigError or ScheduleError where the run could not take it."""
        verified, name = self.verified(schedule)
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
        step = replace(step, buckets=buckets, tied=tied and apart)
        chunks = chunks_for(config, self.dp * self.ep)
        return make_program(pipeline, layout, layers, pp, microbatches, chunks, step=step), layout.schedule


def load_run(
    path: Path, *, num_ranks: int | None, costs: str | None, device_name: str, link_name: str
) -> RunStep:
    """The run of a configuration; `num_ranks` decides what it leaves to the number of ranks."""
    if not path.is_file():
        raise ConfigError(f"--config: there is no file {path}")
    config = load(path)
    parallel = config.parallel
    if num_ranks is None:
        if "auto" in (parallel.dp, parallel.ep):
            raise ConfigError(
                "parallel.dp and parallel.ep of the configuration depend on the number of ranks; "
                "say how many with --ranks"
            )
        dp, ep = int(parallel.dp), int(parallel.ep)
    else:
        try:
            dp, ep = parallel.sizes(num_ranks, config.moe.num_experts, config.moe.expert_tp)
        except ValueError as error:
            raise ConfigError(f"--ranks {num_ranks}: {error}") from None
    table = None if costs is None else load_costs(costs)
    if table is not None and kinds.ATTN_F.name not in table.seconds:
        raise ConfigError(f"--costs {costs}: a run needs seconds of layer ops, like ATTN_F; this has none")
    hardware = device(device_name)
    width = value_bytes(config.model.dtype, hardware)
    priced = StepCosts(step_work(config, dp, ep, width), hardware, link(link_name))
    return RunStep(config=config, dp=dp, ep=ep, costs=table, step_costs=priced)


def answers_of(run: RunStep, schedules: tuple[str, ...]) -> tuple[list[Answer], dict[str, str]]:
    """Answers, fastest first, and why the others cannot be taken."""
    answers, refused = [], {}
    for name in schedules:
        try:
            answers.append(run.answer(name))
        except (ScheduleError, ConfigError) as error:
            refused[name] = str(error)
    return sorted(answers, key=lambda answer: answer.summary.makespan), refused
