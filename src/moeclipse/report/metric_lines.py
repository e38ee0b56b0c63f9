"""Lines of `metrics.jsonl`: as records, or as numbers where many of them are alike.

    records_of(lines)                       # None where a line holds no record
    form = LineForm.of(line)                # None where a line holds more than numbers and words
    numbers_NK, others = form.read(lines)   # of lines that differ in their numbers alone; the other lines

Idea. A run writes the same keys in the same order, a million times. What stands between the numbers is
compared as it is, and numbers are turned together: less than half of what it takes to make a table of each
line.

Contract. Nothing in a line raises; time is linear in its bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeclipse.core.outside import DEPTH, parse_json

LARGEST_STEP = 1 << 53
MOST_KEYS = 256
"""In a form: the pattern of more would take long to make."""
NUMBER = rb"(-?\d[^,}\n]*)"
"""Where each ends is known without a second look, so nothing here is tried twice."""


class LineForm:
    """Keys and words of a line, in their order; numbers may be others."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        switches = {name: value for name, value in record.items() if isinstance(value, bool)}
        numbers = [name for name, value in record.items() if is_number(value) and name not in switches]
        self.names = (*numbers, *switches)
        self._switches = np.array([*switches.values()], dtype=np.float64)
        parts = [
            re.escape(f"{json.dumps(name)}: ".encode())
            + (NUMBER if name in numbers else re.escape(json.dumps(value).encode()))
            for name, value in record.items()
        ]
        line = rb"\{" + b", ".join(parts) + rb"\}\n"
        self._pattern = re.compile(rb"^(?:" + line + rb"|(.*\n))", re.MULTILINE)

    @classmethod
    def of(cls, line: bytes) -> LineForm | None:
        """None for a line that has something to say, or tables."""
        record = record_of(line)
        if record is None or "notes" in record or record.get("skipped", False) is not False:
            return None
        values = record.values()
        if any(isinstance(value, list | dict) for value in values) or len(values) > MOST_KEYS:
            return None
        form = cls(record)
        return None if form.read([line])[1] else form

    def read(self, lines: list[bytes]) -> tuple[np.ndarray, list[bytes]]:
        """Lines that have their ends; numbers [N, K] of those that are like this one, and the others."""
        found = self._pattern.findall(b"".join(lines))
        others = [one[-1] for one in found if one[-1]]
        rows = [b",".join(one[:-1]).decode("ascii", "replace") for one in found if not one[-1]]
        if not rows:
            return np.zeros((0, len(self.names))), others
        try:
            numbers_NK = np.loadtxt(rows, delimiter=",", comments=None, ndmin=2)
        except ValueError:  # what begins as a number need not be one
            return np.zeros((0, len(self.names))), lines
        switches_NK = np.broadcast_to(self._switches, (len(rows), len(self._switches)))
        return np.hstack([numbers_NK, switches_NK]), others


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
    """A line without the loads of experts, which are in `load.npz`, too, and maybe without its ranks: these
    tables take longer to read than all else. Quotes in texts have a backslash before them, so no text is
    taken for one."""
    if not ranks:
        first = line.find(b'"ranks": {')
        last = line.find(b"}", first) if first >= 0 else -1
        if last >= 0:
            line = line[:first] + b'"ranks": null' + line[last + 1 :]
    first = line.find(b'"load": [[')
    last = line.find(b"]]", first) if first >= 0 else -1
    return line if last < 0 else line[:first] + b'"": null' + line[last + 2 :]


def table_of(rows: list[list[Any]]) -> np.ndarray | None:
    """[N, K]; None where one of the values is none that numpy takes for a number."""
    try:
        found = np.array(rows, dtype=np.float64)  # None is NaN
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.ndim == 2 else None


def as_numbers(values: list[Any]) -> np.ndarray:
    """NaN in place of what is none."""
    try:
        found = np.array(values, dtype=np.float64)  # None is NaN
    except (TypeError, ValueError, OverflowError):
        found = np.zeros((0, 0))
    return found if found.ndim == 1 else np.array([number(value, math.nan) for value in values])


def is_number(value: Any) -> bool:
    """True and false count."""
    return isinstance(value, int | float)


def number(value: Any, otherwise: float) -> float:
    """A number of a file, or another one in its place."""
    if not isinstance(value, int | float):
        return otherwise
    try:
        found = float(value)
    except OverflowError:
        return otherwise
    return found if math.isfinite(found) else otherwise
