"""Keys of what a run records: `metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

NO_TENSORBOARD = "metrics.tensorboard needs TensorBoard; pip install moeclipse[tensorboard]"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    tensorboard: bool = False
    """Also write TensorBoard events (needs the `tensorboard` extra)."""
    warmup_steps: int = 3
    """First steps left out of the summary's times."""
    trace: int = -1
    """Three steps of all ranks from this one on (1: the first) go into trace.json; -1: none (`--trace N`)."""
    memory: bool = False
    """Print a memory breakdown, layer by layer, after the first step (--print-memory)."""

    def problems(self) -> Iterator[str]:
        if self.warmup_steps < 0:
            yield f"metrics.warmup_steps ({self.warmup_steps}) must not be negative"
        if self.trace < -1:
            yield f"metrics.trace ({self.trace}) must be a step, 1 or more, or -1: none"
        if self.tensorboard and find_spec("tensorboard") is None:
            yield NO_TENSORBOARD

    def trace_problems(self, steps: int) -> Iterator[str]:
        """What does not go with a run of so many steps."""
        if self.trace > steps:
            yield f"metrics.trace ({self.trace}) must be at most run.steps ({steps}): none would be recorded"

    def traced(self, steps: int, most: int) -> range:
        """Of a run of so many steps, as records count them; 0 is the first, too, as it was once called."""
        first = max(self.trace - 1, 0)
        return range(first, min(first + most, steps)) if self.trace >= 0 else range(0)
