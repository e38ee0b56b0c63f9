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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeclipse.core.outside import DEPTH, MOST_LINE, open_file, parse_json

MOST_ROWS = 5000
MOST_NOTES = 500
"""Notes that are kept; how many there were is known."""
MOST_COLUMNS = 512
MOST_RANK_NUMBERS = 1 << 16
CHUNK, CHUNK_BYTES = 4096, 8 << 20
"""Records that are put into rows together, and bytes of their lines."""
LARGEST_STEP = 1 << 53
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
class Column:
    """Of each row: sum, how many, lowest, highest."""

    sums: np.ndarray
    count: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Column:
        known = np.isfinite(values)
        return cls(
            sums=np.where(known, values, 0.0),
            count=known.astype(np.float64),
            low=np.where(known, values, math.inf),
            high=np.where(known, values, -math.inf),
        )

    def parts(self) -> tuple[np.ndarray, ...]:
        return self.sums, self.count, self.low, self.high

    def join(self, order: np.ndarray, starts: np.ndarray) -> None:
        """One row for each group (`groups`)."""
        if len(starts):
            self.sums = np.add.reduceat(self.sums[order], starts)
            self.count = np.add.reduceat(self.count[order], starts)
            self.low = np.minimum.reduceat(self.low[order], starts)
            self.high = np.maximum.reduceat(self.high[order], starts)


class StepRows:
    """Rows of many columns that grow, and are joined when there are too many."""

    def __init__(self) -> None:
        self.every = 1
        self.last, self.steps = np.zeros(0, dtype=np.int64), np.zeros(0)
        self.columns: dict[str, Column] = {}
        self.rank_last = np.zeros(0, dtype=np.int64)
        self.ranks: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Sums and counts, [rows, P]."""
        self.width = 0

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        step = np.array([record["step"] for record in records], dtype=np.int64)
        kinds = {tuple(record) for record in records}  # most have the same keys
        unknown = {name for keys in kinds for name in keys} - self.columns.keys() - {"step"}
        found = [name for name in unknown if any(is_number(record.get(name)) for record in records)]
        new = sorted(found)[: MOST_COLUMNS - len(self.columns)]
        for name in new:
            self.columns[name] = Column.of(np.full(len(self.last), math.nan))
        order, starts = groups(step // self.every, last=self.every == 1)
        for name, column in self.columns.items():
            more = Column.of(as_numbers([record.get(name) for record in records]))
            more.join(order, starts)
            joined = [np.concatenate(pair) for pair in zip(column.parts(), more.parts(), strict=True)]
            self.columns[name] = Column(sums=joined[0], count=joined[1], low=joined[2], high=joined[3])
        self.last = np.concatenate([self.last, np.maximum.reduceat(step[order], starts)])
        self.steps = np.concatenate([self.steps, np.add.reduceat(np.ones(len(order)), starts)])
        self._add_ranks(records)
        if len(self.last) > 2 * MOST_ROWS:
            self._join()
        while len(self.last) > 2 * MOST_ROWS:
            self.every *= 2
            self._join()

    def _add_ranks(self, records: Sequence[Mapping[str, Any]]) -> None:
        told = [record for record in records if isinstance(record.get("ranks"), dict)]
        widths = [len(row) if isinstance(row := one["ranks"].get("step_ms"), list) else 0 for one in told]
        widths = [width if width <= MOST_RANK_NUMBERS else 0 for width in widths]
        width = max(widths, default=0)
        if width > self.width:  # a run of more ranks: those before are another run's
            self.width, self.ranks, self.rank_last = width, {}, np.zeros(0, dtype=np.int64)
        told = [one for one, found in zip(told, widths, strict=True) if self.width and found == self.width]
        if not told:
            return
        names = {key for one in told for key in one["ranks"]}
        empty = np.zeros((len(self.rank_last), self.width), dtype=np.float32)
        room = max(MOST_RANK_NUMBERS // self.width - len(self.ranks), 0)
        for name in sorted(names - self.ranks.keys())[:room]:
            self.ranks[name] = (empty, empty)
        for name, (sums, count) in self.ranks.items():
            rows = [one["ranks"].get(name) for one in told]
            whole = [row if isinstance(row, list) and len(row) == self.width else () for row in rows]
            empty_row = [math.nan] * self.width
            flat = as_numbers([value for row in whole for value in row or empty_row])
            table = flat.reshape(len(told), self.width).astype(np.float32)
            known = np.isfinite(table)
            self.ranks[name] = (
                np.concatenate([sums, np.where(known, table, 0)]),
                np.concatenate([count, known.astype(np.float32)]),
            )
        steps = np.array([one["step"] for one in told], dtype=np.int64)
        self.rank_last = np.concatenate([self.rank_last, steps])

    def _join(self) -> None:
        """One row for each `every` neighbours, in the order of steps."""
        order, starts = groups(self.last // self.every, last=self.every == 1)
        for column in self.columns.values():
            column.join(order, starts)
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
            columns = {name: one.sums / one.count for name, one in self.columns.items()}
            ranks = {name: (sums / count).astype(float) for name, (sums, count) in self.ranks.items()}
        # Rows of ranks are those of steps: what is told of one is looked for by the other's step.
        at = np.searchsorted(self.last // self.every, self.rank_last // self.every)
        return StepTable(
            step=self.last,
            columns=columns,
            ranks=ranks,
            rank_step=self.last[at],
            count={name: one.count for name, one in self.columns.items()},
            lowest={name: one.low for name, one in self.columns.items()},
            highest={name: one.high for name, one in self.columns.items()},
            steps=self.steps,
        )


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
            whole, ended = len(line) <= MOST_LINE, line.endswith(b"\n")
            if whole and ended:
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
        found = records_of([plain(line, number % every == 0) for number, line in enumerate(lines, first)])
        self._at += sum(map(len, lines))
        self._lines += len(lines)
        for line in lines[-TAIL:]:  # at least one byte each
            self._tail = (self._tail + line)[-TAIL:]
        records = [record for record in found if record is not None]
        self.damaged += sum(
            record is None and bool(line.strip()) for record, line in zip(found, lines, strict=True)
        )
        for record in records:
            if "notes" in record or record.get("skipped"):
                self._note(record)
        if records:
            self.rows.add(records)

    def _note(self, record: Mapping[str, Any]) -> None:
        notes = record.get("notes")
        texts = [str(note)[:2000] for note in notes[:MOST_NOTES]] if isinstance(notes, list) else []
        texts += ["the step was skipped"] if record.get("skipped") else []
        self.num_notes += len(texts)
        self.notes += [(record["step"], text) for text in texts[: MOST_NOTES - len(self.notes)]]

    def table(self) -> StepTable:
        return self.rows.table()


def records_of(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """What is in lines, None where one holds no record; parsed at once, which takes half as long."""
    if all(line.startswith(b"{") and line.count(b"[") + line.count(b"{") <= DEPTH for line in lines):
        try:
            found = parse_json(b"[" + b",".join(lines) + b"]", numbers=False, deep=True)
            if len(found) == len(lines):
                return [checked(value) for value in found]
        except ValueError:
            pass  # one of them is damaged
    return [record_of(line) for line in lines]


def record_of(line: bytes) -> dict[str, Any] | None:
    try:
        return checked(parse_json(line, numbers=False))
    except ValueError:
        return None


def checked(record: Any) -> dict[str, Any] | None:
    """A record with its step as a whole number; None for anything else."""
    try:
        step = record["step"]
        if not isinstance(record, dict) or not 0 <= step < LARGEST_STEP:
            return None
        record["step"] = int(step)
    except (ValueError, KeyError, TypeError, OverflowError, IndexError):
        return None
    record.pop("load", None)
    return record


def plain(line: bytes, ranks: bool) -> bytes:
    """A line without the loads of experts, which are in `load.npz`, too, and maybe without its ranks."""
    line = without(line, b'"load": [[', b"]]")
    return line if ranks else without(line, b'"ranks": {', b"}")


def without(line: bytes, begins: bytes, ends: bytes) -> bytes:
    """A line without one of its tables, which takes longer to read than all else; quotes in texts have a
    backslash before them, so no text is taken for one."""
    first = line.find(begins)
    last = line.find(ends, first) if first >= 0 else -1
    return line if last < 0 else line[:first] + b'"": 0' + line[last + len(ends) :]


def as_numbers(values: list[Any]) -> np.ndarray:
    """NaN in place of what is none."""
    try:
        found = np.array(values, dtype=np.float64)  # None is NaN
    except (TypeError, ValueError, OverflowError):
        found = np.zeros((0, 0))
    if found.ndim != 1:
        found = np.array([number(value, math.nan) for value in values])
    return np.where(np.isfinite(found), found, math.nan)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def number(value: Any, otherwise: float) -> float:
    """A number of a file, or another one in its place; true and false count."""
    if not isinstance(value, int | float):
        return otherwise
    try:
        found = float(value)
    except OverflowError:
        return otherwise
    return found if math.isfinite(found) else otherwise
