"""What a run writes down: one line a step, a summary at the end.

Rank 0 writes; every rank's times (`train/observe/step_times`) are in each line, for many ranks in every few
lines.

Contract. Neither memory nor the size of a line grows with steps, experts or ranks. What cannot be written is
told and left out (`train/run/background_writer`): metrics never end a run.

Whether tokens visit as many experts as `gate.mean_experts` asks for is said once.
A controller moves the limit of each layer (`moe/gate/dynamic_gates`), and there are gates that no limit
helps: one that is sure of its first expert to the last bit leaves nothing for the others to be chosen by.
Then the mean stays off, and whoever reads it in the metrics would have to know what it should be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Protocol, cast

from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import parse_json
from moeclipse.core.steps import nth
from moeclipse.train.observe.metrics_config import NO_TENSORBOARD
from moeclipse.train.observe.run_figures import RunSummary, StepRecord
from moeclipse.train.observe.step_times import TIMES
from moeclipse.train.run.background_writer import Scribe
from moeclipse.train.run.run_files import append_line, keep_lines, set_aside, write_atomic

SUMMED = tuple(f"{name}_ms" for name in (*TIMES, "hidden"))
MOST_NUMBERS = 512
"""Of a table in a line of metrics, on average."""


class StepSums:
    """Sums over steps, so that a run's means need none of its records: memory does not grow with steps."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = -1
        self.num_tokens = 0
        self.sums = dict.fromkeys(SUMMED, 0.0)
        self.experts, self.with_experts = 0.0, 0
        self.balance, self.with_balance = 0.0, 0
        self.load_E: list[int] = []

    def add(self, record: StepRecord) -> None:
        if not self.count:
            self.first, self.num_tokens = record["step"], record["num_tokens"]
        self.count += 1
        self.last = record["step"]
        for key in SUMMED:
            self.sums[key] += record[key]  # type: ignore[literal-required]
        if "mean_experts" in record:
            self.experts, self.with_experts = self.experts + record["mean_experts"], self.with_experts + 1
        if "balance" in record:
            self.balance, self.with_balance = self.balance + record["balance"], self.with_balance + 1
        load_E = sum_load(record["load"])
        self.load_E = [a + b for a, b in zip(self.load_E, load_E, strict=True)] if self.load_E else load_E

    def means(self) -> dict[str, float]:
        if not self.count:
            return {}
        means = {key: total / self.count for key, total in self.sums.items()}
        means = {"tokens_per_s": 1e3 * self.num_tokens / means["step_ms"], **means}
        comm = means["comm_ms"]
        means["hidden_fraction"] = means["hidden_ms"] / comm if comm > 0 else 0.0
        if self.with_experts:
            means["mean_experts"] = self.experts / self.with_experts
        if self.with_balance:
            means["balance"] = self.balance / self.with_balance
        return means


class Metrics:
    """Files of a run directory; on ranks other than 0 nothing is written."""

    def __init__(
        self,
        directory: Path,
        *,
        writes: bool,
        warmup_steps: int,
        tensorboard: bool,
        scribe: Scribe | None = None,
        mean_experts: float = 0.0,
    ) -> None:
        self.directory, self.writes, self.warmup_steps = directory, writes, warmup_steps
        self.scribe = scribe or Scribe()
        self.window, self.experts_held = StepSums(), ExpertsHeld(mean_experts)
        self.count = self.skipped = self.dropped = 0
        self.first: StepRecord | None = None
        self.last: StepRecord | None = None
        self._board = open_tensorboard(directory) if tensorboard and writes else None

    @property
    def path(self) -> Path:
        return self.directory / "metrics.jsonl"

    def continue_from(self, step: int) -> str | None:
        """Drop lines of steps that will be run again; a run that begins anew keeps the old file beside."""
        if not self.writes or not self.path.exists():
            return None
        try:
            if step == 0:
                return f"the metrics of the earlier attempt are in {set_aside(self.path)}"
            self.first, self.skipped, self.dropped = None, 0, 0
            keep_lines(self.path, lambda line: self._stays(line, step))
        except OSError as error:
            return f"{self.path} cannot be continued: {error.strerror or error}; training goes on without"
        return None

    def _stays(self, line: str, step: int) -> bool:
        """Whether a line is of a step before this one; what is told of the whole run counts it."""
        try:
            record = parse_json(line, numbers=False)
            stays, skipped, dropped = record["step"] < step, bool(record["skipped"]), int(record["dropped"])
            float(record["loss"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return is_before(line, step)
        if stays:
            self.first = self.first or record
            self.skipped, self.dropped = self.skipped + skipped, self.dropped + dropped
        return bool(stays)

    def add(self, record: StepRecord) -> None:
        """A step's line; `notes` of it may become more."""
        off = [] if record["skipped"] else self.experts_held.after_step(record["load"], record["num_tokens"])
        if off:
            record["notes"] = [*record.get("notes", ()), *off]
        self.first = self.first or record
        self.last = record
        self.count += 1
        self.skipped += record["skipped"]
        self.dropped += record["dropped"]
        if self.count > self.warmup_steps:
            self.window.add(record)
        self.write_line(record)
        if self._board is not None:
            numbers: dict[str, float] = {
                key: value
                for key, value in record.items()
                if isinstance(value, int | float) and key != "step"
            }
            self.scribe.do("tensorboard", lambda: self._show(record["step"], numbers))

    def write_line(self, record: StepRecord) -> None:
        if self.writes:
            line = json.dumps(shortened(record))
            self.scribe.do("metrics.jsonl", lambda: append_line(self.path, line))

    def _show(self, step: int, numbers: dict[str, float]) -> None:
        assert self._board is not None
        for key, value in numbers.items():
            self._board.add_scalar(key, value, nth(step))

    def summary(self, extra: Mapping[str, object]) -> RunSummary:
        """Means over the steps after warm-up; percentages never without their window.

        Losses, and what was dropped and skipped, are of the whole run, also of earlier starts.
        """
        window = self.window
        if not window.count and self.last is not None:
            window = StepSums()
            window.add(self.last)
        summary = {
            "loss_first": self.first["loss"] if self.first else None,
            "loss_last": self.last["loss"] if self.last else None,
            **window.means(),
            "window": f"steps {window.first} to {window.last}" if window.count else "no steps",
            "load": window.load_E,
            "dropped": self.dropped,
            "skipped": self.skipped,
            "directory": str(self.directory),
            **extra,
        }
        if self.writes:
            text = json.dumps(summary, indent=1) + "\n"
            self.scribe.do("summary.json", lambda: write_atomic(self.directory / "summary.json", text))
        if self._board is not None:
            self.scribe.do("tensorboard", self._board.close)
        return cast(RunSummary, summary)


def shortened(record: StepRecord) -> dict[str, object]:
    """A record as a line holds it: tables of many numbers stand in some lines alone.

    On average a line holds MOST_NUMBERS of a table, however many experts and ranks there are; `load.npz` has
    the loads of steps over the whole run.
    """
    short: dict[str, object] = {**record}
    for key, size in (
        ("load", size_of(record["load"])),
        ("ranks", size_of(record.get("ranks", {}).values())),
    ):
        every = -(-size // MOST_NUMBERS)
        if every > 1 and record["step"] % every:
            short.pop(key, None)
    return short


def size_of(table: Iterable[Sized]) -> int:
    return sum(map(len, table))


def sum_load(load: list[list[int]]) -> list[int]:
    """Per expert, over layers."""
    return [sum(column) for column in zip(*load, strict=True)]


def is_before(line: str, step: int) -> bool:
    try:
        return bool(parse_json(line, numbers=False)["step"] < step)
    except (ValueError, KeyError, TypeError, OverflowError):
        return False  # a line cut short by a kill


class Board(Protocol):
    """TensorBoard's events."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


def open_tensorboard(directory: Path) -> Board:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(NO_TENSORBOARD) from None
    board: Board = SummaryWriter(str(directory / "tensorboard"))
    return board


SETTLED = 100
"""Steps that a controller may take to get there, and about as many that then count in the mean."""
OFF = 0.05
"""Of the goal: a controller that works is nearer."""


class ExpertsHeld:
    """The mean of experts that a token visits, by layer, over about the last `SETTLED` steps."""

    def __init__(self, goal: float) -> None:
        self.goal, self.steps, self.told = goal, 0, False
        self.means: list[float] = []

    def after_step(self, load: list[list[int]], num_tokens: int) -> list[str]:
        """What is to be said after a step that moved limits; `load`: rows by layer and expert."""
        self.steps += bool(self.goal)
        if self.steps <= SETTLED:
            return []
        now = [sum(load_E) / num_tokens for load_E in load]
        weight, before = 1 / min(self.steps - SETTLED, SETTLED), self.means or now
        self.means = [mean + weight * (new - mean) for mean, new in zip(before, now, strict=True)]
        if self.told or self.steps < 2 * SETTLED:
            return []
        off = [f"{i} ({mean:.2f})" for i, mean in enumerate(self.means) if abs(mean / self.goal - 1) > OFF]
        if not off:
            return []
        self.told = True
        return [
            f"gate.mean_experts ({self.goal:g}) is out of reach in layers with experts {', '.join(off)}: no "
            "limit on probabilities makes tokens visit so many on average; choose a goal nearer to these, or "
            "make gates less sure (gate.z_loss)"
        ]
