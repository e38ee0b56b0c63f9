"""Who watches a run: a display, a test, or nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Observer(Protocol):
    """Who watches a run; called on rank 0 only."""

    def start(self, info: dict[str, object]) -> None: ...
    def step(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self, summary: dict[str, Any]) -> None: ...


def tell_phase(observer: Observer | None, text: str) -> None:
    """What a start is at, for observers that want to know."""
    phase: Callable[[str], None] | None = getattr(observer, "phase", None)
    if phase is not None:
        phase(text)


class Silence:
    """Watches nothing."""

    def start(self, info: dict[str, object]) -> None: ...
    def step(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self, summary: dict[str, Any]) -> None: ...
