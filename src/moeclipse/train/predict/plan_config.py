"""From a model's name, file or folder to a question for the planner, and from a plan to a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeclipse.core.config import Sourced, nearest, problems_of, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.cost.cluster import Cluster
from moeclipse.cost.step_bytes import StateBytes
from moeclipse.hf.config_file import is_model_folder
from moeclipse.plan.layouts import fits, search
from moeclipse.plan.question import Nearest, Plan, Request
from moeclipse.plan.state_place import StatePlace
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.memory_config import expert_weight_problems, travel_problems
from moeclipse.train.predict.shapes import SHAPES, shape_values
from moeclipse.train.presets import merge, preset_names

if TYPE_CHECKING:
    import torch

MORE_GPUS = tuple(2**n for n in range(1, 9))
"""Times as many, that are asked about where nothing fits."""
LEAST_WRONG = 0.05
"""A batch may be so far from what was asked for, as a share, to be divisible by many ranks."""
MICROBATCHES = 8
"""And by so many for each."""
LESS_STATE: tuple[dict[str, str], ...] = (
    {"optim.state": "8bit"},
    {"optim.master": "low-bits"},
    {"optim.main_grad": "bf16"},
    {"optim.master": "none"},
)
"""What is left of the optimizer's state, each beside those before it."""
BETTER = 0.9
"""A way out that changes more is told where a step takes less than this part of those before it."""


def config_for(
    source: str, flags: Mapping[str, Sourced] | None = None, *, on_cpu: bool = False
) -> TrainConfig:
    """Of a named model, a preset, a TOML file, or a Hugging Face folder or its config.json; `flags` win."""
    config = read_config(source, flags or {})
    if config.model.memory:
        raise ConfigError(
            "model.memory cannot be planned: keys behind the segment are not counted; set it to 0"
        )
    if config.memory.main_grad == "host":
        raise ConfigError(
            "memory.main_grad = 'host' cannot be planned: the way of gradients is counted by "
            "`moeclipse simulate` alone; leave it out"
        )
    if on_cpu:
        return with_values(config, {"model.dtype": "float32"})
    if config.model.dtype in ("float32", "float64"):
        raise ConfigError(
            f"model.dtype = {config.model.dtype!r} cannot be planned for GPUs: what their kernels reach is "
            "known of 16 bits; leave it out"
        )
    return with_values(config, {"model.dtype": "bfloat16"})


def read_config(source: str, flags: Mapping[str, Sourced]) -> TrainConfig:
    path, more = Path(source), dict(flags)
    in_16_bits = {"model.dtype": Sourced("bfloat16", source)}  # who names a model says nothing of its type
    if source in SHAPES:
        given = {key: Sourced(value, source) for key, value in shape_values(source).items()}
        return merge(flags=in_16_bits | given | more).built.with_warnings()
    if source in preset_names():
        return merge(preset=source, flags=more).built.with_warnings()
    if path.name == "config.json" and path.is_file():
        return read_config(str(path.parent), flags)
    if path.is_dir() and is_model_folder(path):
        folder = {"model.from_hf": Sourced(source, "--model")}
        return merge(flags=in_16_bits | folder | more).built.with_warnings()
    if path.suffix == ".toml" and path.is_file():
        return merge(path, flags=more).built.with_warnings()
    names = [*SHAPES, *preset_names()]
    close = nearest(source, names)
    hint = f"did you mean {close!r}? " if close else ""
    raise ConfigError(
        f"{source!r} is no model: {hint}give a TOML file, a folder with config.json, or one of "
        f"{', '.join(names)}"
    )


def state_of(config: TrainConfig, held: torch.dtype | None = None) -> StateBytes:
    """Of one parameter; `held` is the type of weights, bfloat16 if left out."""
    import torch  # a model that cannot be read is told without it

    from moeclipse.train.optim.buckets import summed_type
    from moeclipse.train.predict.state_bytes import each_element, update_bytes

    held = held or torch.bfloat16
    return StateBytes(
        weight=held.itemsize,
        gradient=summed_type(config.optim.main_grad, held).itemsize,
        shard=each_element(config.optim, "all", held),
        update=update_bytes(config.optim, held),
    )


def place_of(config: TrainConfig, cluster: Cluster) -> StatePlace:
    """Where state and inputs of layers may lie; no rule of the configuration is against it."""
    import torch

    from moeclipse.train.predict.state_bytes import each_element
    from moeclipse.train.predict.step_program import estimated_weights

    memory = config.memory
    travels = replace(memory, place="host")
    open_to = not list(travel_problems(travels, config.optim, config.placement, config.parallel.pp))
    room = min(1e9 * memory.host_gb or cluster.host_memory, cluster.host_memory)
    held = torch.float32 if cluster.device.name == "cpu" else torch.bfloat16
    alone = replace(config.pipeline, recompute="full", recompute_layers="all", overlap="off", schedule="auto")
    given = (memory, config.optim, config.placement, alone, config.model, config.lora)
    open_to_weights = not list(expert_weight_problems(*given, config.moe.expert_bias, 1))
    sent = with_values(config, {"memory.weights": "host"})
    sizes = [size for size, _ in estimated_weights(sent, float(held.itemsize)).values()]
    return StatePlace(
        host_room=room,
        state=open_to,
        each=each_element(config.optim, memory.states, held),
        fixed=memory.share if memory.place == "host" else None,
        buffers=memory.buffers,
        by_layer=config.optim.clip == "layer",
        inputs=memory.activations,
        weights=memory.weights if open_to_weights else "device",
        weight_bytes=max(sizes, default=0.0),
    )


def says_batch(source: str) -> bool:
    """Whether a file or a preset says how many tokens a step has."""
    return Path(source).suffix == ".toml" or (source in preset_names() and source not in SHAPES)


def batch_for(tokens: float, sequence: int, num_gpus: int) -> int:
    """Sequences of a step: near to what was asked for, and divisible by as many ranks as can be."""
    wanted = max(round(tokens / sequence), 1)
    wrong = int(LEAST_WRONG * wanted)
    near = range(wanted - wrong, wanted + wrong + 1)
    return max(near, key=lambda batch: (math.gcd(batch, MICROBATCHES * num_gpus), -abs(batch - wanted)))


def values_of(plan: Plan, batch: int, sequence: int) -> dict[str, object]:
    """Keys of a configuration that make a run take this layout."""
    layout = plan.layout
    paired = layout.overlap != "off"
    schedule = layout.schedule if layout.pp > 1 or layout.schedule == "layers" else "auto"
    values: dict[str, Any] = {
        "parallel.pp": layout.pp,
        "parallel.dp": layout.dp,
        "parallel.ep": layout.ep,
        "parallel.tp": layout.tp,
        "pipeline.schedule": schedule,
        "pipeline.overlap": "pair" if paired else "off",
        "pipeline.recompute": layout.recompute,
        "pipeline.layers": plan.stages if layout.pp > 1 else (),
        "pipeline.layers_per_virtual_stage": "auto",
        "pipeline.budget": layout.budget or "auto",
        "memory.place": "host" if layout.host else "device",
        "memory.share": layout.host or 1.0,
        "optim.accumulate": layout.microbatches,
        "data.batch_size": batch,
        "data.seq_len": sequence,
    }
    if layout.inputs:
        values["memory.activations"] = "host"
    if layout.weights:
        values["memory.weights"] = "host"
    return values


def planned_config(config: TrainConfig, plan: Plan, batch: int, sequence: int) -> TrainConfig:
    return with_values(config, values_of(plan, batch, sequence))


def rules_of(config: TrainConfig, batch: int, sequence: int) -> Callable[[Plan], str]:
    """What the configuration says against a plan, as the planner asks for it."""

    def refuse(plan: Plan) -> str:
        return next(iter(problems_of(planned_config(config, plan, batch, sequence))), "")

    return refuse


def what_would_fit(request: Request, config: TrainConfig, nearest_one: Nearest) -> list[str]:
    """Where nothing fits: the layout that comes nearest, and the usual ways out with what they come to."""
    device = request.terms.cluster.device.name
    lines = [
        f"nothing fits: the nearest is {nearest_one.layout.title}, which takes "
        f"{nearest_one.peak / 2**30:.1f} GiB of {nearest_one.room / 2**30:.1f} that may be taken of {device}"
    ]
    best: Plan | None = None
    for changes in ways_out(config, request.num_gpus):
        other = with_values(config, changes)
        asked = changed(request, other)
        plans = search(asked).plans if fits(asked) else ()
        if plans and (best is None or plans[0].time.seconds < BETTER * best.time.seconds):
            best = plans[0]
            lines.append(f"it would fit with {flags_of(changes)}: {summary_of(request, best)}")
    enough = next((n * request.num_gpus for n in MORE_GPUS if fits(grown(request, n))), 0)
    if enough:
        lines.append(f"it would fit on {enough:,} GPUs")
    elif len(lines) == 1:
        most = MORE_GPUS[-1] * request.num_gpus
        lines.append(f"it would not fit on {most:,} GPUs either: take shorter sequences (--seq-len)")
    return lines


def ways_out(config: TrainConfig, num_gpus: int) -> Iterator[dict[str, str]]:
    """Settings of the optimizer that take less, least change first: none computes what was asked for."""
    clips: tuple[dict[str, str], ...] = ({},) if num_gpus > 1 else ({}, {"optim.clip": "layer"})
    for clip in clips:
        ways = clip
        for change in ({}, *LESS_STATE):
            ways = ways | change
            other = with_values(config, ways)
            if other != config and not list(problems_of(other)):
                yield ways


def changed(request: Request, config: TrainConfig) -> Request:
    """The same question of another optimizer."""
    place = place_of(config, request.terms.cluster)
    terms = replace(request.terms, state=state_of(config), place=place)
    return replace(request, terms=terms, refuse=rules_of(config, request.batch, terms.sequence))


def summary_of(request: Request, plan: Plan) -> str:
    rate = request.batch * request.terms.sequence / plan.time.seconds / request.num_gpus
    host = f", {plan.host_bytes / 2**30:.1f} GiB of the host" if plan.host_bytes else ""
    size = f"{plan.peak / 2**30:.1f} GiB{host}"
    return f"{plan.time.seconds:.3g} s a step, {rate:,.0f} tokens/s/GPU, {size} ({plan.layout.title})"


def grown(request: Request, factor: int) -> Request:
    """On more GPUs, with at least as many sequences."""
    num_gpus = factor * request.num_gpus
    return replace(request, num_gpus=num_gpus, batch=max(request.batch, num_gpus))


def flags_of(values: Mapping[str, object]) -> str:
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in values.items())
