"""Watching a run, or not."""

from __future__ import annotations

from moeclipse.train.run.observers import Silence, tell_phase


class Display(Silence):
    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)


def test_phases_are_told_to_who_wants_them() -> None:
    display = Display()
    for observer in (None, Silence(), display):
        tell_phase(observer, "loading")
    assert display.phases == ["loading"]
