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
    """From this step on three steps of all ranks are recorded in trace.json; -1: none (`--trace N`)."""
    memory: bool = False
    """Tell after the first step what memory is taken for, layer by layer (--print-memory)."""

    def problems(self) -> Iterator[str]:
        if self.warmup_steps < 0:
            yield f"metrics.warmup_steps ({self.warmup_steps}) must not be negative"
        if self.trace < -1:
            yield f"metrics.trace ({self.trace}) must be a step, 0 or more, or -1: none"
        if self.tensorboard and find_spec("tensorboard") is None:
            yield NO_TENSORBOARD

    def trace_problems(self, steps: int) -> Iterator[str]:
        """What does not go with a run of so many steps."""
        if self.trace >= steps:
            yield (
                f"metrics.trace ({self.trace}) must be below run.steps ({steps}): steps count from 0, "
                "and none would be recorded"
            )
