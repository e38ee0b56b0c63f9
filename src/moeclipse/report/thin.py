"""Fewer points that look the same: a page must not grow with the steps of a run.

A curve of N steps becomes at most `most` bins of neighbours, each with mean, lowest and highest: no spike is
lost. Heat becomes one byte a cell.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

BYTES_PER_DOUBLING, EVEN = 32, 128
"""A cell's byte is 128 + 32 log2(value / mean), within 1 and 255: a factor of 16 either way; 0: no rows."""


def bin_starts(count: int, most: int) -> np.ndarray:
    """Where each of at most `most` bins of `count` neighbours begins."""
    return (np.arange(min(count, most)) * count // max(min(count, most), 1)).astype(np.int64)


def curve(
    values: np.ndarray, most: int, lowest: np.ndarray | None = None, highest: np.ndarray | None = None
) -> dict[str, list[float | None]]:
    """Mean of each bin, None where it holds no number; where bins are of several steps, low and high, too.

    `lowest` and `highest`: of the steps behind each value, where there are several.
    """
    starts = bin_starts(len(values), most)
    if not len(starts):
        return {"mean": []}
    finite = np.isfinite(values)
    count = np.add.reduceat(finite.astype(float), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / count
    found = {"mean": numbers(mean)}
    if len(starts) < len(values) or lowest is not None or highest is not None:
        lowest, highest = (values if part is None else part for part in (lowest, highest))
        low = np.minimum.reduceat(np.where(finite, lowest, math.inf), starts)
        high = np.maximum.reduceat(np.where(finite, highest, -math.inf), starts)
        found |= {"low": numbers(low), "high": numbers(high)}
    return found


def numbers(values: np.ndarray, digits: int = 5) -> list[float | None]:
    """As JSON: short, and None for what is no number."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]


def mean_of_bins(table: np.ndarray, most: int) -> np.ndarray:
    """Neighbouring rows of a table (axis 0) averaged to at most `most`; what is no number counts as 0."""
    starts = bin_starts(len(table), most)
    if len(starts) == len(table):
        return np.nan_to_num(table.astype(float))
    widths = np.diff([*starts, len(table)]).reshape(-1, *[1] * (table.ndim - 1))
    return np.add.reduceat(np.nan_to_num(table.astype(float)), starts, axis=0) / widths


def heat_bytes(table: np.ndarray, axis: int = -1) -> str:
    """Each cell relative to the mean along `axis`, as base64 of one byte a cell."""
    mean = table.mean(axis, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = EVEN + BYTES_PER_DOUBLING * np.log2(table / mean)
    cells = np.where(table > 0, np.clip(np.nan_to_num(np.round(level), nan=0.0), 1, 255), 0)
    return base64.b64encode(cells.astype(np.uint8).tobytes()).decode()


def safe(value: Any) -> Any:
    """The same value without what JSON cannot say: NaN and infinities become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [safe(inner) for inner in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
