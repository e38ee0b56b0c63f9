"""From a model's name, file or folder to a question for the planner, and from a plan to a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeclipse.core.config import Sourced, nearest, problems_of, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.cost.step_bytes import StateBytes
from moeclipse.hf.config_file import is_model_folder
from moeclipse.plan.layouts import Nearest, Plan, Request, fits
from moeclipse.train.config import TrainConfig
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
LESS_STATE = ({"optim.state": "8bit"}, {"optim.state": "8bit", "optim.master": "low-bits"})


def config_for(source: str, flags: Mapping[str, Sourced] | None = None) -> TrainConfig:
    """Of a named model, a preset, a TOML file, or a Hugging Face folder or its config.json; `flags` win."""
    path, more = Path(source), dict(flags or {})
    if source in SHAPES:
        given = {key: Sourced(value, source) for key, value in shape_values(source).items()}
        config = merge(flags=given | more).built.with_warnings()
    elif source in preset_names():
        config = merge(preset=source, flags=more).built.with_warnings()
    elif path.name == "config.json" and path.is_file():
        return config_for(str(path.parent), flags)
    elif path.is_dir() and is_model_folder(path):
        folder = {"model.from_hf": Sourced(source, "--model")}
        config = merge(flags=folder | more).built.with_warnings()
    elif path.suffix == ".toml" and path.is_file():
        config = merge(path, flags=more).built.with_warnings()
    else:
        names = [*SHAPES, *preset_names()]
        close = nearest(source, names)
        hint = f"did you mean {close!r}? " if close else ""
        raise ConfigError(
            f"{source!r} is no model: {hint}give a TOML file, a folder with config.json, or one of "
            f"{', '.join(names)}"
        )
    if config.model.memory:
        raise ConfigError(
            "model.memory cannot be planned: keys behind the segment are not counted; set it to 0"
        )
    return with_values(config, {"model.dtype": "bfloat16"})


def state_of(config: TrainConfig, held: torch.dtype | None = None) -> StateBytes:
    """Of one parameter; `held` is the type of weights, bfloat16 if left out."""
    import torch  # a model that cannot be read is told without it

    from moeclipse.train.optim.buckets import summed_type
    from moeclipse.train.predict.state_bytes import per_element

    held = held or torch.bfloat16
    gradient = summed_type(config.optim.main_grad, held).itemsize
    return StateBytes(weight=held.itemsize, gradient=gradient, shard=per_element(config.optim, held))


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
    schedule = layout.schedule if layout.pp > 1 else "auto"
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
        "optim.accumulate": layout.microbatches,
        "data.batch_size": batch,
        "data.seq_len": sequence,
    }
    return values


def planned_config(config: TrainConfig, plan: Plan, batch: int, sequence: int) -> TrainConfig:
    return with_values(config, values_of(plan, batch, sequence))


def rules_of(config: TrainConfig, batch: int, sequence: int) -> Any:
    """What the configuration says against a plan, as the planner asks for it."""

    def refuse(plan: Plan) -> str:
        return next(iter(problems_of(planned_config(config, plan, batch, sequence))), "")

    return refuse


def what_would_fit(request: Request, config: TrainConfig, nearest_one: Nearest) -> list[str]:
    """Where nothing fits: the layout that comes nearest, and the first of the usual ways out."""
    device = request.terms.cluster.device.name
    lines = [
        f"nothing fits: the nearest is {nearest_one.layout.title}, which takes "
        f"{nearest_one.peak / 2**30:.1f} GiB of {nearest_one.room / 2**30:.1f} that may be taken of {device}"
    ]
    for changes in LESS_STATE:
        if fits(replace(request, state=state_of(with_values(config, changes)))):
            lines.append("it would fit with " + flags_of(changes))
            break
    enough = next((n * request.num_gpus for n in MORE_GPUS if fits(grown(request, n))), 0)
    if enough:
        lines.append(f"it would fit on {enough:,} GPUs")
    elif len(lines) == 1:
        most = MORE_GPUS[-1] * request.num_gpus
        lines.append(f"it would not fit on {most:,} GPUs either: take shorter sequences (--seq-len)")
    return lines


def grown(request: Request, factor: int) -> Request:
    """On more GPUs, with at least as many sequences."""
    num_gpus = factor * request.num_gpus
    return replace(request, num_gpus=num_gpus, batch=max(request.batch, num_gpus))


def flags_of(values: Mapping[str, object]) -> str:
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in values.items())
