"""Records of steps, from a step's end to the line of metrics.jsonl: times of all ranks come two steps later.

    records = Records(learner, metrics, note, speed)
    with records.to_the_end():
        records.after_step(record)         # after every step
        records.settle()                   # before a checkpoint. Collective: waits for all times

A record is whole, and metrics take it, once `train/observe/step_times` has told where its time went. A run
that fails leaves lines without these times for the steps before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from moeclipse.train.observe.run_figures import StepRecord
from moeclipse.train.run.exchange_note import ExchangeNote
from moeclipse.train.run.incidents import kept
from moeclipse.train.run.metrics import Metrics
from moeclipse.train.step.learner import Learner


class Records:
    """Of one run."""

    def __init__(
        self,
        learner: Learner,
        metrics: Metrics,
        note: Callable[[str], None],
        speed: Callable[[float], dict[str, float]],
    ) -> None:
        """`note` hears what is to be said of steps; `speed` is a step's by its milliseconds."""
        self.learner, self.metrics, self.note, self.speed = learner, metrics, note, speed
        self.exchange = ExchangeNote()
        self.waiting: dict[int, StepRecord] = {}
        """By step, without the times of other ranks."""

    def after_step(self, record: StepRecord) -> None:
        self.waiting[record["step"]] = record
        self._complete()

    def settle(self) -> None:
        """Every step so far becomes whole. Collective."""
        self.learner.times.settle()
        self._complete()

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """What was not whole when the run ended, well or badly, is written down as far as it is known."""
        try:
            yield
            self.settle()
        finally:
            for record in self.waiting.values():
                self.metrics.write_line(record)
            self.waiting = {}

    def _complete(self) -> None:
        for step, times in self.learner.times.take():
            record = self.waiting.pop(step, None)
            if record is None:  # the run has gone back
                continue
            notes = []
            for named in times.pop("stragglers", ()):
                if self.metrics.writes:
                    kept(self.metrics.directory, {"kind": "straggler", **named})
                notes.append(named["what"])
            per_second = 1e3 * record["num_tokens"] / times["step_ms"]
            more = {**times, "tokens_per_s": per_second} | self.speed(times["step_ms"])
            record |= cast(StepRecord, more)
            known = len(record.get("notes", ()))
            self.metrics.add(record)
            notes += record.get("notes", ())[known:]
            notes += self.exchange.after_step(self.learner.layers, record)
            for note in notes:
                self.note(note)
