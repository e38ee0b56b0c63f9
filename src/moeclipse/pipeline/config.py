"""How microbatches are scheduled over stages, and what of their communication is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moeclipse.schedule.shape import RECOMPUTED, Recompute

Schedule = Literal[
    "auto",
    "gpipe",
    "1f1b",
    "1f1b-pairs",
    "vpp",
    "vpp+1",
    "zb-h1",
    "zb-h2",
    "zb-m",
    "zb-v",
    "dualpipe",
    "dualpipev",
    "layers",
]
IN_GROUPS = ("vpp", "vpp+1")
MANY_STAGES = ("vpp", "vpp+1", "zb-m")
"""Schedules that take any number of stages a rank."""
PAIRED = ("pp1", "1f1b-pairs", "vpp+1", "dualpipe", "dualpipev")
"""Schedules in which the forward of one microbatch stands beside the backward of another."""
MIRRORED = ("dualpipe",)
"""Those of two copies of the model: ranks p and pp - 1 - p hold the same layers."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Schedule, overlap and recompute. Microbatches are those of optim.accumulate, also where pp = 1."""

    schedule: Schedule = "auto"
    """auto: chosen with overlap = "auto"; otherwise 1f1b, or one that has pairs (pp = 1: of microbatches).
    layers (pp = 1): all microbatches through a layer before the next."""
    overlap: Literal["auto", "off", "pair", "pair+self"] = "auto"
    """pair: forward of one microbatch under backward of another; +self: warm-up and cool-down, too; auto:
    what is predicted to be clearly faster than off, and a schedule that goes with it."""
    layers_per_virtual_stage: int | Literal["auto"] = "auto"
    """vpp, zb-m: layers of one stage, of which a rank has several; auto: two stages a rank, of zb-m one."""
    group_size: int | Literal["auto"] = "auto"
    """vpp: microbatches that pass a stage before the rank's next one begins (Megatron's microbatch group
    size), at least pp; the last group may be shorter. auto: groups of pp or a little more, all alike."""
    budget: int | Literal["auto"] = "auto"
    """zb-m: microbatches whose activations a rank may hold, for which an order is searched; auto: pp."""
    layers: tuple[int, ...] = ()
    """Layers of each stage, where they are not to be shared out evenly."""
    chunks: int | Literal["auto"] = "auto"
    """+self: microbatches outside pairs are cut into so many, by samples; auto: 2 where there are samples."""
    recompute: Literal["auto", "off", "norms", "attn", "mlp", "moe", "full"] = "auto"
    """What of a layer is recomputed in backward instead of kept; auto: on GPUs, what it takes to fit."""
    recompute_layers: int | Literal["all"] = "all"
    """Only the first so many layers of the model do."""
    comm_sms: int = 0
    """On CUDA: the most multiprocessors communication kernels may take; 0: as the library likes."""

    def problems(self) -> Iterator[str]:
        known = ("auto", "off", "norms", *(name for name in RECOMPUTED if name != "off"))
        if self.recompute not in known:
            yield f"pipeline.recompute ({self.recompute!r}) must be one of {', '.join(map(repr, known))}"
        if self.recompute == "norms" and self.used:
            yield (
                "pipeline.recompute = 'norms' is for microbatches one after the other; with a schedule or "
                "overlap choose 'attn', 'mlp', 'moe' or 'full'"
            )
        for name, schedules in (("group_size", IN_GROUPS), ("budget", ("zb-m",))):
            if getattr(self, name) != "auto" and self.schedule not in schedules:
                yield (
                    f"pipeline.{name} ({getattr(self, name)}) is for pipeline.schedule = "
                    f"{' or '.join(map(repr, schedules))}, not {self.schedule!r}"
                )
        for name in ("layers_per_virtual_stage", "chunks", "group_size", "budget"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                yield f'pipeline.{name} ({value}) must be at least 1, or "auto"'
        if self.recompute_layers != "all" and self.recompute_layers < 0:
            yield f'pipeline.recompute_layers ({self.recompute_layers}) must not be negative, or "all"'
        if self.comm_sms < 0:
            yield f"pipeline.comm_sms ({self.comm_sms}) must not be negative"
        if self.overlap == "pair" and self.schedule not in ("auto", *PAIRED):
            yield (
                f"pipeline.overlap = 'pair' needs a schedule with pairs, and {self.schedule} has none: in it "
                f"the F and B side by side belong to one microbatch, or are too close; use "
                f"{', '.join(PAIRED[1:])}, or pipeline.overlap = 'pair+self'"
            )
        if self.layers and any(count < 1 for count in self.layers):
            yield f"pipeline.layers ({list(self.layers)}) must give every stage at least one layer"
        if self.layers and self.layers_per_virtual_stage != "auto":
            yield "pipeline.layers and pipeline.layers_per_virtual_stage both cut the layers; give only one"

    @property
    def used(self) -> bool:
        """Whether schedule or overlap ask for the runtime on one rank of a pipeline."""
        return self.schedule != "auto" or self.overlaps

    @property
    def mirrored(self) -> bool:
        """Whether each layer is held at two places of the pipeline."""
        return self.schedule in MIRRORED

    @property
    def orders(self) -> dict[str, int]:
        """What `schedule/catalogue.build` is told of groups and budget, where the schedule has any."""
        given = {"group_size": (self.group_size, IN_GROUPS), "budget": (self.budget, ("zb-m",))}
        return {name: size for name, (size, of) in given.items() if size != "auto" and self.schedule in of}

    @property
    def overlaps(self) -> bool:
        """Whether anything is to be hidden; what was left to a run to choose is not, until it has."""
        return self.overlap in ("pair", "pair+self")

    def runs_program(self, pp: int, num_ranks: int) -> bool:
        """Whether microbatches go through a program; ranks that exchange rows run parts again by one, too."""
        return pp > 1 or self.used or (num_ranks > 1 and self.recomputed != "off")

    def runs_again(self, layer: int) -> bool:
        """Whether this layer of the model has something to recompute."""
        return self.recompute_layers == "all" or layer < self.recompute_layers

    @property
    def recomputed(self) -> Recompute:
        """As far as a program knows it."""
        return "off" if self.recompute == "auto" or self.recompute == "norms" else self.recompute
