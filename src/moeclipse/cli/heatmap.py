"""A small heat map for a terminal: one line for each layer, one shade for each expert.

Shades say how an expert's load compares with the mean of its layer: below a quarter, below three quarters,
around it, up to four times, above. They differ as characters, so nothing is lost without colour.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

SHADES = " ░▒▓█"
ASCII_SHADES = " .+#@"
BORDERS = (0.25, 0.75, 1.5, 4.0)
MAX_LINES = 12


def heat_lines(
    load_LE: np.ndarray, room: int, unicode: bool, layers: Sequence[int] | None = None
) -> list[Text]:
    """Lines of at most `room` cells; where experts are more than cells, the busiest of neighbours counts."""
    shades = SHADES if unicode else ASCII_SHADES
    numbers = range(len(load_LE)) if layers is None else layers
    cells = max(min(room - 21, 128), 8)
    lines = []
    for number, load_E in list(zip(numbers, load_LE, strict=True))[:MAX_LINES]:
        relative = load_E / max(load_E.mean(), 1e-300)
        parts = np.array_split(relative, min(cells, len(relative)))
        width = max(min(cells // len(parts), 3), 1)
        drawn = "".join(shades[int(np.searchsorted(BORDERS, part.max()))] * width for part in parts)
        lines.append(Text.assemble(f"layer {number:<4}", (drawn, "blue"), f" max {relative.max():.1f} x"))
    if len(load_LE) > MAX_LINES:
        lines.append(Text(f"... and {len(load_LE) - MAX_LINES} more layers", style="dim"))
    return lines
