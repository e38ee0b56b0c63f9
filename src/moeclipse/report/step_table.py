"""Numbers of steps as `metrics.jsonl` tells them: read once, thinned while they are read.

    file = MetricsFile(path)
    file.read()                       # what was added since the last time
    file.table().column("loss")       # one number a row, NaN where its steps have none

Idea. Up to 2 x MOST_ROWS steps stand as they are, a row for each. Of more, 2, 4, 8, ... neighbours become one
row: their mean, lowest and highest. So neither memory nor a page grows with steps, and no spike is lost.

Contract. Lines are data of somebody else's making: nothing in them raises. What is no record with a step is
counted (`damaged`) and left out. The last word on a step counts while each has a row of its own; a file that
was replaced, cut or changed is read anew.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeclipse.core.outside import MOST_LINE, open_file
from moeclipse.report.metric_lines import (
    LARGEST_STEP,
    LineForm,
    as_numbers,
    is_number,
    plain,
    record_of,
    records_of,
    table_of,
)

MOST_ROWS = 5000
MOST_NOTES = 500
"""Notes that are kept; how many there were is known."""
MOST_COLUMNS = 512
MOST_RANK_NUMBERS = 1 << 16
CHUNK, CHUNK_BYTES = 4096, 8 << 20
"""Records that are put into rows together, and bytes of their lines."""
TAIL = 4096
"""Bytes before the end of what was read, by which a file that has grown is known."""


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Numbers of steps, in the order of steps; a row is one step, or neighbours of a long run."""

    step: np.ndarray
    """The last step of each row."""
    columns: dict[str, np.ndarray]
    ranks: dict[str, np.ndarray] = field(default_factory=dict)
    """By name: [rows in which ranks were told apart, P]."""
    rank_step: np.ndarray = field(default_factory=lambda: np.zeros(0))
    count: dict[str, np.ndarray] = field(default_factory=dict)
    """By name: numbers behind each row; left out: one."""
    lowest: dict[str, np.ndarray] = field(default_factory=dict)
    highest: dict[str, np.ndarray] = field(default_factory=dict)
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Steps behind each row."""

    def column(self, name: str) -> np.ndarray:
        found = self.columns.get(name)
        return np.full(len(self.step), math.nan) if found is None else found

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())

    def total(self, name: str) -> np.ndarray:
        """The sum behind each row."""
        return self.column(name) * self.count.get(name, np.ones(len(self.step)))

    @property
    def num_steps(self) -> int:
        return int(self.steps.sum()) if len(self.steps) else len(self.step)


@dataclass(kw_only=True)
class Cells:
    """Of each column and row, [C, N]: sum, how many, lowest, highest."""

    sums: np.ndarray
    count: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, values_CN: np.ndarray) -> Cells:
        known = np.isfinite(values_CN)
        return cls(
            sums=np.where(known, values_CN, 0.0),
            count=known.astype(np.float64),
            low=np.where(known, values_CN, math.inf),
            high=np.where(known, values_CN, -math.inf),
        )

    def join(self, order: np.ndarray, starts: np.ndarray) -> None:
        """One row for each group (`groups`)."""
        if len(starts):
            self.sums = np.add.reduceat(self.sums[:, order], starts, axis=1)
            self.count = np.add.reduceat(self.count[:, order], starts, axis=1)
            self.low = np.minimum.reduceat(self.low[:, order], starts, axis=1)
            self.high = np.maximum.reduceat(self.high[:, order], starts, axis=1)

    def append(self, more: Cells, axis: int) -> None:
        """Columns (0) or rows (1)."""
        self.sums = np.concatenate([self.sums, more.sums], axis)
        self.count = np.concatenate([self.count, more.count], axis)
        self.low = np.concatenate([self.low, more.low], axis)
        self.high = np.concatenate([self.high, more.high], axis)


class StepRows:
    """Rows of many columns that grow, and are joined when there are too many."""

    def __init__(self) -> None:
        self.every = 1
        self.last, self.steps = np.zeros(0, dtype=np.int64), np.zeros(0)
        self.names: dict[str, int] = {}
        """Which column is whose."""
        self.cells = Cells.of(np.zeros((0, 0)))
        self.rank_last = np.zeros(0, dtype=np.int64)
        self.ranks: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Sums and counts, [rows, P]."""
        self.width = 0

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        step = np.array([record["step"] for record in records], dtype=np.int64)
        told = [one for one in records if isinstance(one.get("ranks"), dict)]
        self._add_ranks([(one["step"], one.pop("ranks")) for one in told])
        self._append(step, self._values(records))

    def add_numbers(self, names: Sequence[str], numbers_NK: np.ndarray) -> None:
        """Records that hold numbers alone, one of them the step; where each step has no row of its own."""
        step = numbers_NK[:, list(names).index("step")].astype(np.int64)
        self._add_columns(names)
        values_CN = np.full((len(self.names), len(numbers_NK)), math.nan)
        for at, name in enumerate(names):
            if name in self.names:
                values_CN[self.names[name]] = numbers_NK[:, at]
        self._append(step, values_CN)

    def _append(self, step: np.ndarray, values_CN: np.ndarray) -> None:
        more = Cells.of(values_CN)
        order, starts = groups(step // self.every, last=self.every == 1)
        more.join(order, starts)
        self.cells.append(more, axis=1)
        self.last = np.concatenate([self.last, np.maximum.reduceat(step[order], starts)])
        self.steps = np.concatenate([self.steps, np.add.reduceat(np.ones(len(order)), starts)])
        if len(self.last) > 2 * MOST_ROWS:
            self._join()
        while len(self.last) > 2 * MOST_ROWS:
            self.every *= 2
            self._join()

    def _values(self, records: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """[C, N]; records of one kind, which have the same keys in one order, are turned together."""
        kinds: dict[tuple[str, ...], list[int]] = {}
        for at, record in enumerate(records):
            kinds.setdefault(tuple(record), []).append(at)
        unknown = {name for keys in kinds for name in keys} - self.names.keys()
        self._add_columns(
            [name for name in unknown if any(is_number(record.get(name)) for record in records)]
        )
        values_CN = np.full((len(self.names), len(records)), math.nan)
        for keys, places in kinds.items():
            names = [(self.names[name], at) for at, name in enumerate(keys) if name in self.names]
            rows = [list(records[at].values()) for at in places]
            whole_NK = table_of(rows)
            for column, at in names:
                values_CN[column, places] = (
                    as_numbers([row[at] for row in rows]) if whole_NK is None else whole_NK[:, at]
                )
        return values_CN

    def _add_columns(self, names: Iterable[str]) -> None:
        """Those of them that there are not yet, and that there is room for."""
        new = sorted(set(names) - self.names.keys() - {"step"})[: MOST_COLUMNS - len(self.names)]
        self.names |= {name: number for number, name in enumerate(new, len(self.names))}
        self.cells.append(Cells.of(np.full((len(new), len(self.last)), math.nan)), axis=0)

    def _add_ranks(self, told: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Steps, and what their ranks said."""
        widths = [len(row) if isinstance(row := ranks.get("step_ms"), list) else 0 for _, ranks in told]
        widths = [width if width <= MOST_RANK_NUMBERS else 0 for width in widths]
        width = max(widths, default=0)
        if width > self.width:  # a run of more ranks: those before are another run's
            self.width, self.ranks, self.rank_last = width, {}, np.zeros(0, dtype=np.int64)
        told = [one for one, found in zip(told, widths, strict=True) if self.width and found == self.width]
        if not told:
            return
        names = {key for _, ranks in told for key in ranks}
        empty = np.zeros((len(self.rank_last), self.width), dtype=np.float32)
        room = max(MOST_RANK_NUMBERS // self.width - len(self.ranks), 0)
        for name in sorted(names - self.ranks.keys())[:room]:
            self.ranks[name] = (empty, empty)
        for name, (sums, count) in self.ranks.items():
            rows = [ranks.get(name) for _, ranks in told]
            whole = [row if isinstance(row, list) and len(row) == self.width else () for row in rows]
            empty_row = [math.nan] * self.width
            flat = as_numbers([value for row in whole for value in row or empty_row])
            table = flat.reshape(len(told), self.width).astype(np.float32)
            known = np.isfinite(table)
            self.ranks[name] = (
                np.concatenate([sums, np.where(known, table, 0)]),
                np.concatenate([count, known.astype(np.float32)]),
            )
        steps = np.array([step for step, _ in told], dtype=np.int64)
        self.rank_last = np.concatenate([self.rank_last, steps])

    def _join(self) -> None:
        """One row for each `every` neighbours, in the order of steps."""
        order, starts = groups(self.last // self.every, last=self.every == 1)
        self.cells.join(order, starts)
        if len(starts):
            self.steps = np.add.reduceat(self.steps[order], starts)
            self.last = np.maximum.reduceat(self.last[order], starts)
        order, starts = groups(self.rank_last // self.every, last=self.every == 1)
        if len(starts):
            self.ranks = {
                name: (np.add.reduceat(sums[order], starts), np.add.reduceat(count[order], starts))
                for name, (sums, count) in self.ranks.items()
            }
            self.rank_last = np.maximum.reduceat(self.rank_last[order], starts)

    def table(self) -> StepTable:
        self._join()
        with np.errstate(invalid="ignore", divide="ignore"):
            means_CN = self.cells.sums / self.cells.count
            ranks = {name: (sums / count).astype(float) for name, (sums, count) in self.ranks.items()}
        # Rows of ranks are those of steps: what is told of one is looked for by the other's step.
        at = np.searchsorted(self.last // self.every, self.rank_last // self.every)
        return StepTable(
            step=self.last,
            columns=self._by_name(means_CN),
            ranks=ranks,
            rank_step=self.last[at],
            count=self._by_name(self.cells.count),
            lowest=self._by_name(self.cells.low),
            highest=self._by_name(self.cells.high),
            steps=self.steps,
        )

    def _by_name(self, cells_CN: np.ndarray) -> dict[str, np.ndarray]:
        return {name: cells_CN[column] for name, column in self.names.items()}


def groups(keys: np.ndarray, *, last: bool) -> tuple[np.ndarray, np.ndarray]:
    """(order, where each group of equal keys begins in it); `last`: of each group only the last one."""
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=np.int64(-1)))
    if last and len(starts):
        order = order[[*(starts[1:] - 1), len(keys) - 1]]
        starts = np.arange(len(order))
    return order, starts


class MetricsFile:
    """`metrics.jsonl` of a run, as far as it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.rows, self.notes, self.num_notes = StepRows(), list[tuple[int, str]](), 0
        self.damaged = 0
        self.unfinished = False
        """The last line may still be written."""
        self._at, self._tail, self._state, self._lines = 0, b"", (0, 0, 0), 0
        self._form: LineForm | None = None

    def read(self) -> None:
        """OSError where the file cannot be opened."""
        with open_file(self.path) as file:
            found = os.fstat(file.fileno())
            state = (found.st_ino, found.st_size, found.st_mtime_ns)
            if state == self._state:
                return
            if not self._has_grown(file, state):
                self._forget()
            self._state = state
            file.seek(self._at)
            self._read_on(file)

    def _has_grown(self, file: Any, state: tuple[int, int, int]) -> bool:
        if state[0] != self._state[0] or state[1] <= self._state[1] or state[1] < self._at:
            return False
        file.seek(max(self._at - len(self._tail), 0))
        return bool(file.read(len(self._tail)) == self._tail)

    def _read_on(self, file: Any) -> None:
        lines: list[bytes] = []
        size = 0
        self.unfinished = False
        while line := file.readline(MOST_LINE + 1):
            whole = len(line) <= MOST_LINE
            if whole and line.endswith(b"\n"):
                lines.append(line)
                size += len(line)
                if len(lines) >= CHUNK or size >= CHUNK_BYTES:
                    self._take(lines)
                    lines, size = [], 0
                continue
            self._take(lines)
            lines, size = [], 0
            if whole:  # it may be written further: then the next read begins with it
                self.unfinished = bool(line.strip()) and record_of(line) is None
                if not self.unfinished:
                    self._take([line])
                break
            self._skip(file, line)
        self._take(lines)

    def _skip(self, file: Any, line: bytes) -> None:
        """A line of more bytes than any record has."""
        while line:
            self._at += len(line)
            line = b"" if line.endswith(b"\n") else file.readline(MOST_LINE + 1)
        self._lines, self.damaged, self._tail = self._lines + 1, self.damaged + 1, b""

    def _take(self, lines: Sequence[bytes]) -> None:
        """Whole lines that follow what was read."""
        if not lines:
            return
        every, first = self.rows.every, self._lines + 1
        # Of neighbours that become one row, one tells ranks apart.
        short = [plain(line, number % every == 0) for number, line in enumerate(lines, first)]
        self._at += sum(map(len, lines))
        self._lines += len(lines)
        self._tail = end_of(self._tail, lines)
        # While each step has a row of its own the last word on it counts, so order matters.
        if every > 1 and short[-1].endswith(b"\n"):
            short = self._numbers(short)
        found = records_of(short)
        records = [record for record in found if record is not None]
        self.damaged += sum(
            record is None and bool(line.strip()) for record, line in zip(found, short, strict=True)
        )
        for record in records:
            if "notes" in record or record.get("skipped"):
                self._note(record)
        if records:
            self.rows.add(records)

    def _numbers(self, lines: list[bytes]) -> list[bytes]:
        """Takes those that are like one before them; the others."""
        form = self._form
        others = lines
        if form is not None:
            numbers_NK, others = form.read(lines)
            step = numbers_NK[:, form.names.index("step")]
            known = (step >= 0) & (step < LARGEST_STEP)
            self.damaged += int((~known).sum())
            if known.any():
                self.rows.add_numbers(form.names, numbers_NK[known])
        if 2 * len(others) > len(lines):
            self._form = LineForm.of(min(others[-2:], key=len))  # of two neighbours one has ranks
        return others

    def _note(self, record: Mapping[str, Any]) -> None:
        notes = record.get("notes")
        texts = [str(note)[:2000] for note in notes[:MOST_NOTES]] if isinstance(notes, list) else []
        texts += ["the step was skipped"] if record.get("skipped") else []
        self.num_notes += len(texts)
        self.notes += [(record["step"], text) for text in texts[: MOST_NOTES - len(self.notes)]]

    def table(self) -> StepTable:
        return self.rows.table()


def end_of(before: bytes, lines: Sequence[bytes]) -> bytes:
    """The last bytes of what was read."""
    found = b""
    for line in reversed(lines):
        found = line + found
        if len(found) >= TAIL:
            return found[-TAIL:]
    return (before + found)[-TAIL:]
