"""Who watches a run: a display, a test, or nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moeclipse.train.observe.run_figures import RunInfo, RunSummary, StepRecord


class Observer(Protocol):
    """Who watches a run; called on rank 0 only."""

    def start(self, info: RunInfo) -> None: ...
    def step(self, record: StepRecord) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self, summary: RunSummary) -> None: ...


def tell_phase(observer: Observer | None, text: str) -> None:
    """What a start is at, for observers that want to know."""
    phase: Callable[[str], None] | None = getattr(observer, "phase", None)
    if phase is not None:
        phase(text)


class Silence:
    """Watches nothing."""

    def start(self, info: object) -> None: ...
    def step(self, record: object) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self, summary: object) -> None: ...
