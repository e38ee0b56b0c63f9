"""From a configuration to the program that a pipeline runs.

    schedule      which microbatch when                       (`schedule/catalogue`)
    stages        which layers where                          even, by layers_per_virtual_stage, or as listed
    overlap       PAIR and SELF as the templates say          (`schedule/templates`)
    verifier      nothing leaves this file unproved

Chosen where the schedule alone is auto: with overlap, pairs; over several ranks vpp+1 where layers and
microbatches allow it, because doubled warm-up (1f1b-pairs) costs twice the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.core.shares import even_bounds
from moeclipse.pipeline.config import MANY_STAGES, MIRRORED, PipelineConfig
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.launch import StepShape
from moeclipse.schedule.legal import broken_rules, default_stages_per_rank, require_legal
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The schedule's name and the layers of each stage; of two copies, one behind the other."""

    schedule: str
    stages: tuple[range, ...]
    rank_of: tuple[int, ...]
    num_chains: int = 1
    """Copies of the model, which run in opposite directions."""

    @property
    def first_copy(self) -> StageLayout:
        """One copy of the model: all that stages say of layers, and what an evaluation runs through."""
        num = len(self.stages) // self.num_chains
        return replace(self, stages=self.stages[:num], rank_of=self.rank_of[:num], num_chains=1)

    def held_by(self, rank: int) -> dict[int, range]:
        """Stages of a rank, by number."""
        return {s: layers for s, layers in enumerate(self.stages) if self.rank_of[s] == rank}

    def layers_of(self, rank: int) -> list[int]:
        return sorted(layer for layers in self.held_by(rank).values() for layer in layers)


def lay_out(config: PipelineConfig, num_layers: int, num_ranks: int, num_microbatches: int) -> StageLayout:
    """Which layers go where; raises ConfigError with what would fit."""
    name = choose_schedule(config, num_layers, num_ranks, num_microbatches)
    per_rank = stages_per_rank(config, name, num_layers, num_ranks)
    try:
        require_legal(name, num_ranks, num_microbatches, per_rank)
    except ScheduleError as error:
        raise ConfigError(
            f"pipeline.schedule: {error} (ranks are parallel.pp, microbatches optim.accumulate)"
        ) from None
    chains = 2 if name in MIRRORED else 1
    num_stages = num_ranks * per_rank // chains
    if config.layers:
        if len(config.layers) != num_stages or sum(config.layers) != num_layers:
            raise ConfigError(
                f"pipeline.layers ({list(config.layers)}) must list the layers of {num_stages} stages, "
                f"{num_layers} (model.num_layers) in all, on parallel.pp = {num_ranks}"
            )
        bounds = [sum(config.layers[:stage]) for stage in range(num_stages + 1)]
    else:
        if num_layers < num_stages:
            raise ConfigError(
                f"{name} on parallel.pp = {num_ranks} makes {num_stages} stages, but model.num_layers is "
                f"{num_layers}; every stage needs a layer"
            )
        bounds = even_bounds(num_layers, num_stages)
    try:
        placement = build(name, num_ranks, num_microbatches, per_rank, **config.orders).pipeline().placement
    except ScheduleError as error:
        raise ConfigError(f"pipeline.group_size: {error}") from None
    stages = tuple(range(first, last) for first, last in pairwise(bounds))
    return StageLayout(
        schedule=name, stages=stages * chains, rank_of=placement.rank_of, num_chains=placement.num_chains
    )


def choose_schedule(config: PipelineConfig, num_layers: int, num_ranks: int, num_microbatches: int) -> str:
    if config.schedule != "auto":
        return config.schedule
    if not config.overlaps or num_microbatches == 1:
        return "1f1b"
    if num_ranks == 1:
        return "pp1"
    per_rank = stages_per_rank(config, "vpp+1", num_layers, num_ranks)
    fits = per_rank > 1 and num_layers >= num_ranks * per_rank
    return (
        "vpp+1" if fits and not broken_rules("vpp+1", num_ranks, num_microbatches, per_rank) else "1f1b-pairs"
    )


def stages_per_rank(config: PipelineConfig, name: str, num_layers: int, num_ranks: int) -> int:
    if config.layers and name not in MIRRORED:
        return max(len(config.layers) // num_ranks, 1)
    if name == "layers":
        return num_layers
    if config.layers_per_virtual_stage == "auto" or name not in MANY_STAGES:
        return default_stages_per_rank(name)
    return max(num_layers // (num_ranks * config.layers_per_virtual_stage), 1)


def make_program(
    config: PipelineConfig,
    layout: StageLayout,
    layers: Sequence[LayerShape],
    num_ranks: int,
    num_microbatches: int,
    chunks: int = 1,
    *,
    reduce: bool = False,
    step: StepShape | None = None,
) -> Verified:
    """The verified program; `layers` are those of the whole model, as `describe` says.

    `step`: with all that travels, and the end of the step, as a run executes it. `reduce`: instead, with one
    op for the gradients of each stage.
    """
    shaped = [
        replace(
            layer,
            recompute=config.recomputed if config.runs_again(index) else "off",
            head=index == len(layers) - 1,
        )
        for index, layer in enumerate(layers)
    ]
    per_rank = len(layout.stages) // num_ranks
    actions = build(layout.schedule, num_ranks, num_microbatches, per_rank, **config.orders)
    overlap = "off" if config.overlap == "auto" else config.overlap
    how = Expansion(overlap=overlap, chunks=chunks, split="layer")
    stages = [[shaped[i] for i in stage] for stage in layout.stages]
    return verify(expand(actions, stages, how, reduce=reduce, step=step))
