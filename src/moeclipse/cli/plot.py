"""The course of a loss as a small plot for a terminal, a few lines high.

In braille each character is two dots wide and four high, so a plot of five lines has twenty levels; without
Unicode it is made of stars. The plot fills its width from left to right as `total` values come: where they
are more than its columns, neighbours are averaged, where they are fewer, a line goes from one to the next.
Values that are not finite leave a gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, from its upper to its lower row, left and right."""
BRAILLE = 0x2800
AXIS_WIDTH = 9


def plot_lines(values: Sequence[float], width: int, height: int, unicode: bool, total: int = 0) -> list[str]:
    """`height` lines of at most `width` characters, with the highest and lowest value at the left."""
    columns, rows = (2, 4) if unicode else (1, 1)
    room = max(width - AXIS_WIDTH, 1) * columns
    points = spread_to(values, max(room * len(values) // max(total, len(values), 1), 1))
    finite = [value for value in points if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    levels = height * rows - 1
    cells = [[0] * -(-len(points) // columns) for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(points):
        if not math.isfinite(value):
            before = None
            continue
        # Halves: the distance of the largest numbers is none.
        y = round((high / 2 - value / 2) / (high / 2 - low / 2) * levels) if high > low else levels
        # A line, not dots: levels between neighbours belong to it.
        begin = y if before is None else before
        for level in range(min(y, begin), max(y, begin) + 1):
            cells[level // rows][x // columns] |= DOTS[level % rows][x % columns] if unicode else 1
        before = y
    marks = {0: label(high), height - 1: label(low)}
    bar = "│" if unicode else "|"
    return [
        f"{marks.get(row, ''):>{AXIS_WIDTH - 2}} {bar}" + "".join(map(shown if unicode else starred, line))
        for row, line in enumerate(cells)
    ]


def spread_to(values: Sequence[float], width: int) -> list[float]:
    """`width` values along the course of these: means of neighbours, or points between them."""
    if len(values) >= width or len(values) < 2:
        return average_to(values, width)
    places = [index * (len(values) - 1) / (width - 1) for index in range(width)]
    found = []
    for place in places:
        first = min(int(place), len(values) - 2)
        part = place - first
        found.append(values[first] if part == 0 else values[first] * (1 - part) + values[first + 1] * part)
    return found


def label(value: float) -> str:
    text = f"{value:.3f}"
    return text if len(text) <= AXIS_WIDTH - 2 else f"{value:.0e}"


def shown(bits: int) -> str:
    return chr(BRAILLE + bits) if bits else " "


def starred(bits: int) -> str:
    return "*" if bits else " "


def average_to(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of its share."""
    count = len(values)
    if count <= width:
        return list(values)
    edges = [count * index // width for index in range(width + 1)]
    parts = [values[low:high] for low, high in itertools.pairwise(edges)]
    return [sum(part) / len(part) for part in parts]
