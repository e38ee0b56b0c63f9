"""How a run begins from weights of a model that is not of its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moeclipse.moe.config import MoEConfig

FREE = ("num_dense_layers", "dense_layers", "d_ff")
"""Keys of the model that upcycling changes."""


def is_kept(key: str) -> bool:
    """Whether a dotted key of a dense model's shape is one of the upcycled model, too."""
    return key.startswith("model.") and key.removeprefix("model.") not in FREE


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """What becomes of the weights that `run.init_from` names."""

    upcycle: Literal["off", "copy", "split"] = "off"
    """Make experts of the feed-forward blocks of a dense model: whole copies, or parts of their width."""
    noise: float = 0.0
    """Noise on experts so made, as a multiple of model.init_std: copies differ from the start."""

    def problems(self) -> Iterator[str]:
        if self.noise < 0:
            yield f"init.noise ({self.noise}) must not be negative"
        if self.noise and self.upcycle == "off":
            yield f"init.noise ({self.noise}) needs init.upcycle = 'copy' or 'split'"


def upcycle_problems(
    init: InitConfig, init_from: str, num_expert_layers: int, moe: MoEConfig
) -> Iterator[str]:
    """What experts cannot be made of a dense model's blocks for."""
    if (how := init.upcycle) == "off":
        return
    if not init_from:
        yield f"init.upcycle ({how!r}) needs run.init_from: the dense model that experts are made of"
    if not num_expert_layers:
        yield f"init.upcycle ({how!r}) needs layers with experts; lower model.num_dense_layers"
    for key, usual in (("num_shared_experts", 0), ("activation", "swiglu"), ("expert_bias", False)):
        if (value := getattr(moe, key)) != usual:
            yield (
                f"moe.{key} ({value!r}) cannot go with init.upcycle ({how!r}): a dense block has "
                f"nothing to make it of; set it to {usual!r}"
            )
