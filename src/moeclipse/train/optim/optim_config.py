"""How weights are updated, and in which types that is kept.

A narrow type saves memory and costs bits; which combinations lose more than bits is said here, before a run
begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

LARGEST_BETA2 = 0.996
"""With bfloat16 moments: beyond it v times beta2 rounds back to v."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with warm-up and decay, its state sharded over ranks."""

    lr: float = 1e-3
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """After warm-up: half a cosine or a line down to the end; wsd: level, then a line; or level."""
    decay_share: float = 0.2
    """wsd: the last so many of all steps, as a share, in which the learning rate falls."""
    min_lr_ratio: float = 0.1
    """Of optim.lr: what is left of it at the last step (not with constant)."""
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Bound on the gradient norm; 0: no clipping."""
    clip: Literal["global", "layer"] = "global"
    """Whose norm: of all gradients, or of each layer by itself, which is updated as soon as it is known."""
    accumulate: int = 1
    """Microbatches per step."""
    bucket_mb: float = 25.0
    """Gradients are reduced in buckets of about this size, while backward goes on."""
    max_bad_steps: int = 10
    """So many steps in a row with a non-finite loss or gradient end the run."""
    loss_scale: float | Literal["auto"] = "auto"
    """The loss is multiplied by it before backward; auto: found while training in float16, 1 otherwise."""
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Type of both moments; 8bit: of matrices, in blocks of up to 256 elements, rounded by chance."""
    master: Literal["fp32", "low-bits", "none"] = "fp32"
    """Updates add to: fp32 weights; the same as low bits of bf16; none: bf16 alone, rounded by chance."""
    main_grad: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients add up over microbatches and ranks."""
    frozen: tuple[str, ...] = ()
    """Parameters whose names hold one of these patterns (embed, layers.0.*, gate) are not trained."""
    lr_factors: tuple[str, ...] = ()
    """PATTERN=FACTOR: where a name holds the pattern, lr is so many times as large; the first that does."""

    def problems(self) -> Iterator[str]:
        if self.state == "bf16" and self.beta2 > LARGEST_BETA2:
            yield (
                f"optim.state = 'bf16' needs optim.beta2 ({self.beta2}) of at most {LARGEST_BETA2}: a second "
                "moment in bfloat16 cannot fall by less than 0.4 %, and would stay where it is; lower "
                "optim.beta2 (0.95 is usual), or set optim.state = 'fp32'"
            )
        if self.lr <= 0:
            yield f"optim.lr ({self.lr}) must be positive"
        if not 0 <= self.min_lr_ratio <= 1:
            yield f"optim.min_lr_ratio ({self.min_lr_ratio}) must be between 0 and 1"
        if not 0 < self.decay_share <= 1:
            yield f"optim.decay_share ({self.decay_share}) must be above 0 and at most 1"
        if self.decay_share != OptimConfig.decay_share and self.schedule != "wsd":
            yield (
                f"optim.decay_share ({self.decay_share}) needs optim.schedule = 'wsd', not "
                f"{self.schedule!r}; leave it out, or choose wsd"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"optim.{name} ({getattr(self, name)}) must be at least 0 and below 1"
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                yield f"optim.{name} ({getattr(self, name)}) must not be negative"
        for name in ("accumulate", "max_bad_steps"):
            if getattr(self, name) < 1:
                yield f"optim.{name} ({getattr(self, name)}) must be at least 1"
        if self.loss_scale != "auto" and not 0 < self.loss_scale < math.inf:
            yield f"optim.loss_scale ({self.loss_scale}) must be auto or a positive number"
        for name in ("eps", "bucket_mb"):
            if getattr(self, name) <= 0:
                yield f"optim.{name} ({getattr(self, name)}) must be positive"
        if not all(pattern.strip("*") for pattern in self.frozen):
            yield f"optim.frozen ({list(self.frozen)}) holds a pattern that picks everything; name a part"
        for text in self.lr_factors:
            pattern, factor = factor_of(text)
            if not pattern or not 0 < factor < math.inf:
                yield (
                    f"optim.lr_factors ({text!r}) must be PATTERN=FACTOR with a positive factor, such as "
                    "embed=0.1; what must not move belongs into optim.frozen"
                )


def factor_of(text: str) -> tuple[str, float]:
    """(pattern, factor) of `PATTERN=FACTOR`; a factor that is no number is NaN."""
    pattern, _, number = text.rpartition("=")
    try:
        return pattern.strip(), float(number)
    except ValueError:
        return pattern.strip(), math.nan


def picks(pattern: str, name: str) -> bool:
    """Whether a pattern of `optim.frozen` or `optim.lr_factors` means a parameter of this name."""
    return fnmatchcase(name, f"*{pattern}*")


def type_problems(optim: OptimConfig, dtype: str) -> Iterator[str]:
    """What does not go with a model of this type (`model.dtype`)."""
    for key in ("master", "main_grad"):
        value = getattr(optim, key)
        if value != "fp32" and dtype != "bfloat16":
            yield (
                f"optim.{key} = {value!r} needs a bfloat16 model; set model.dtype ({dtype}) to 'bfloat16', "
                "or leave it out"
            )
    if optim.clip == "layer" and dtype == "float16":
        yield (
            "optim.clip = 'layer' cannot go with model.dtype = 'float16': an update under too high a loss "
            "scale could not be taken back; choose 'bfloat16'"
        )
    if optim.state != "fp32" and dtype == "float64":
        yield f"optim.state = {optim.state!r} cannot go with model.dtype = 'float64'; set it to 'fp32'"
