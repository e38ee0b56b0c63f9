"""How a run outlives faults: what it saves and when, and how it sees that no bit has changed by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moeclipse.comm.config import deadline_problems


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int | Literal["auto"] = "auto"
    """Save after so many steps; auto: by time, every `minutes`; 0: at the end only."""
    minutes: float = 10.0
    """With every = "auto": minutes from one save to the next."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory; false: training waits for the disk."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    at_end: bool = True
    """Save after the last step."""
    export: Literal["end", "always", "off"] = "end"
    """export/ of runs that began from a Hugging Face model: at the end, or also after every save."""
    deadline_s: float = 1800.0
    """How long ranks wait for the slowest one while a checkpoint is written or verified."""

    def problems(self) -> Iterator[str]:
        if self.every != "auto" and self.every < 0:
            yield f'checkpoint.every ({self.every}) must not be negative; 0: at the end only, "auto": by time'
        if not 0 < self.minutes < math.inf:
            yield f"checkpoint.minutes ({self.minutes}) must be positive; checkpoint.every = 0: no such saves"
        if self.keep < 1:
            yield f"checkpoint.keep ({self.keep}) must be at least 1"
        yield from deadline_problems("checkpoint.deadline_s", self.deadline_s)


@dataclass(frozen=True, kw_only=True)
class IntegrityConfig:
    """Whether weights and optimizer state are what they were (docs/reliability.md)."""

    every: int | Literal["auto"] = "auto"
    """Steps between comparisons of what ranks hold twice or know by digest; auto: 0.5 % of time; 0: never."""
    repair: Literal["stop", "reload"] = "stop"
    """After a difference: stop, or go on from the newest checkpoint, once for each step."""

    def problems(self) -> Iterator[str]:
        if self.every != "auto" and self.every < 0:
            yield f'integrity.every ({self.every}) must not be negative; 0: never, "auto": by time'
