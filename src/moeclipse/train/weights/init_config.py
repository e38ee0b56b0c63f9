"""How a run begins from weights of a model that is not of its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
