"""What lies in the host's memory: optimizer state, inputs of layers, gradients, weights of experts.

What cannot go together is said here, before a run begins; whether the host has room is known when the number
of ranks is (`train/optim/state_place`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeclipse.schedule.input_travel import WEIGHTS_AT_ONCE
from moeclipse.train.optim.optim_config import picks

if TYPE_CHECKING:
    from moeclipse.balance.config import PlacementConfig
    from moeclipse.model.config import ModelConfig
    from moeclipse.model.lora_config import LoraConfig
    from moeclipse.pipeline.config import PipelineConfig
    from moeclipse.train.optim.optim_config import OptimConfig


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Optimizer state, gradients, activations and weights in the host's memory (docs/host-memory.md)."""

    place: Literal["device", "host", "auto"] = "device"
    """Where moments and master weights lie; auto: on the host as much as does not fit the device."""
    states: Literal["all", "moments", "master"] = "all"
    """Which of them may lie on the host."""
    share: float = 1.0
    """With place = "host": this part of it, layer by layer; the rest stays on the device."""
    activations: Literal["auto", "device", "host"] = "auto"
    """Where inputs of layers that are recomputed whole lie until then; auto: on the host where place = "auto"
    finds that a step fits no other way."""
    main_grad: Literal["auto", "device", "host"] = "auto"
    """Where gradients wait for the norm of all and for their updates under the next forward; auto: as for
    activations."""
    weights: Literal["auto", "device", "host"] = "auto"
    """Where weights of experts lie; on the host, each layer's visit the device for forward and backward;
    auto: as for activations."""
    buffers: int = 3
    """Where state visits the device for its update, there is room for so many large buckets, or layers; for
    so many inputs of layers on either way, and for the experts of so many layers."""
    device_gb: float = 0.0
    """With auto: memory of the device that a rank may fill; 0: what is free."""
    host_gb: float = 0.0
    """Most memory of the host that a rank takes; 0: what is free, shared by the ranks of a host."""
    copy_gb_s: float = 0.0
    """On CPU: copies take as long as over a wire of this rate; 0: as fast as memory is."""

    @property
    def travels(self) -> bool:
        """Whether state may lie on the host."""
        return self.place != "device"

    def problems(self) -> Iterator[str]:
        if not 0 < self.share <= 1:
            yield f"memory.share ({self.share}) must be above 0 and at most 1; memory.place = 'device': none"
        if self.share != 1 and self.place != "host":
            yield f"memory.share ({self.share}) needs memory.place = 'host', not {self.place!r}"
        if self.buffers < 1:
            yield f"memory.buffers ({self.buffers}) must be at least 1"
        for name in ("device_gb", "host_gb", "copy_gb_s"):
            if not 0 <= getattr(self, name) < math.inf:
                yield f"memory.{name} ({getattr(self, name)}) must be a number, 0 or more"


def experts_stay(placement: PlacementConfig) -> bool:
    """Whether experts stay where they are."""
    moves = placement.moves and not placement.at_ease  # which gives way (`train/placement/may_move`)
    return not (moves or placement.slots or placement.slots_per_rank != "auto")


def travel_problems(
    memory: MemoryConfig, optim: OptimConfig, placement: PlacementConfig, pp: int
) -> Iterator[str]:
    """What state on the host, and updates by layers, cannot go with."""
    still = experts_stay(placement)
    if memory.travels and not still:
        yield (
            f"memory.place ({memory.place!r}) needs experts that stay where they are: their state would have "
            "to move with them; set placement.planner = 'static' and leave placement.slots out"
        )
    if memory.place == "auto" and pp > 1:
        yield (
            f"memory.place = 'auto' needs parallel.pp = 1, not {pp}: stages differ in what they hold; set it "
            "to 'host', with a memory.share"
        )
    if memory.travels and memory.states == "master" and optim.master == "none":
        yield "memory.states = 'master' needs master weights, and optim.master is 'none'; choose 'moments'"
    if memory.main_grad == "host":
        yield from gradient_problems(optim, still)
    if optim.clip == "layer" and not still:
        yield (
            "optim.clip = 'layer' needs experts that stay where they are; set placement.planner = 'static' "
            "and leave placement.slots out"
        )
    if optim.clip == "layer" and not optim.clip_norm:
        yield "optim.clip = 'layer' needs optim.clip_norm: a bound on the norm of each layer"


def gradient_problems(optim: OptimConfig, still: bool) -> Iterator[str]:
    """Why gradients cannot lie on the host; `still`: experts stay where they are."""
    told = "memory.main_grad = 'host'"
    if optim.clip != "global":
        yield (
            f"{told} needs optim.clip = 'global', not {optim.clip!r}: by layers gradients are read as soon "
            "as they are there"
        )
    if optim.accumulate > 1:
        yield (
            f"{told} needs optim.accumulate = 1, not {optim.accumulate}: gradients of microbatches add up "
            "where they are"
        )
    if not still:
        yield (
            f"{told} needs experts that stay where they are; set placement.planner = 'static' and leave "
            "placement.slots out"
        )


def activation_problems(pipeline: PipelineConfig, model: ModelConfig) -> Iterator[str]:
    """Why inputs of layers cannot lie on the host."""
    told = "memory.activations = 'host'"
    if pipeline.recompute != "full":
        yield (
            f"{told} needs pipeline.recompute = 'full', not {pipeline.recompute!r}: layers that are "
            "recomputed whole keep nothing but their inputs"
        )
    if model.num_layers < 3:
        yield f"{told} needs three layers, not {model.num_layers}: the first and the last keep theirs"
    elif not pipeline.runs_again(1):
        yield (
            f"{told} needs pipeline.recompute_layers above {pipeline.recompute_layers}: the first layer "
            "keeps its input"
        )
    if pipeline.schedule not in ("auto", *WEIGHTS_AT_ONCE):
        yield (
            f"{told} does not go with pipeline.schedule = {pipeline.schedule!r}, which leaves weight "
            f"gradients for later; choose one of {', '.join(map(repr, ('auto', *WEIGHTS_AT_ONCE)))}"
        )


def expert_weight_problems(
    memory: MemoryConfig,
    optim: OptimConfig,
    placement: PlacementConfig,
    pipeline: PipelineConfig,
    model: ModelConfig,
    lora: LoraConfig,
    biased: bool,
    pp: int,
) -> Iterator[str]:
    """Why weights of experts, `biased` or not, cannot lie on the host."""
    told, layers = "memory.weights = 'host'", model.num_expert_layers
    if layers <= memory.buffers:
        yield (
            f"{told} needs more layers with experts ({layers}) than memory.buffers ({memory.buffers}): "
            "otherwise all of them are on the device anyway"
        )
    if pipeline.recompute != "full" or pipeline.recompute_layers != "all":
        yield (
            f"{told} needs pipeline.recompute = 'full' in all layers: weights come back for backward as a "
            "layer runs again"
        )
    if pp > 1 or pipeline.overlaps or pipeline.schedule not in ("auto", "layers"):
        yield (
            f"{told} needs one rank whose microbatches go one after the other, or layer by layer: set "
            "parallel.pp to 1, pipeline.overlap to 'off' and pipeline.schedule to 'auto' or 'layers'"
        )
    if not experts_stay(placement):
        yield (
            f"{told} needs experts that stay where they are; set placement.planner = 'static' and leave "
            "placement.slots out"
        )
    if optim.clip != "layer" and trains_experts(optim.frozen, model, lora, biased):
        yield (
            f"{told} needs optim.clip = 'layer' where experts are trained, not {optim.clip!r}: they are "
            "updated while they are on the device; or freeze them (lora.rank, optim.frozen)"
        )


def trains_experts(frozen: Sequence[str], model: ModelConfig, lora: LoraConfig, biased: bool) -> bool:
    """Whether weights of experts learn, their adapters apart."""
    each = ("up", "down", *(("up_bias", "down_bias") if biased else ()))
    names = [f"layers.{layer}.moe.experts.{name}" for layer in model.expert_layers for name in each]
    return not lora.rank and not all(any(picks(pattern, name) for pattern in frozen) for name in names)
