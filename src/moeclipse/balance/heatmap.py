"""Heat maps of loads as PNG, from nothing but zlib.

Idea: panels of coloured cells side by side, one row for each layer, all with the same scale: dark cells have
little to do, the brightest ones most. Titles and numbers come from a bitmap font of 3 x 5 dots.

Contract: `write_png` takes uint8 [height, width, 3] and writes a file that any viewer opens.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Dark blue over teal to pale yellow: brightness rises steadily, so it reads in grey too.
COLOURS = np.array(
    [
        [13, 8, 42],
        [45, 32, 112],
        [42, 84, 148],
        [33, 130, 148],
        [56, 172, 132],
        [146, 208, 92],
        [253, 240, 150],
    ]
)
BACKGROUND = (250, 250, 248)
INK = (60, 60, 66)
FAINT = (150, 150, 156)
# fmt: off
GLYPHS = {
    "0": "###/#.#/#.#/#.#/###", "1": ".#./##./.#./.#./###", "2": "###/..#/###/#../###",
    "3": "###/..#/.##/..#/###", "4": "#.#/#.#/###/..#/..#", "5": "###/#../###/..#/###",
    "6": "###/#../###/#.#/###", "7": "###/..#/..#/.#./.#.", "8": "###/#.#/###/#.#/###",
    "9": "###/#.#/###/..#/###", "A": ".#./#.#/###/#.#/#.#", "B": "##./#.#/##./#.#/##.",
    "C": ".##/#../#../#../.##", "D": "##./#.#/#.#/#.#/##.", "E": "###/#../##./#../###",
    "F": "###/#../##./#../#..", "G": ".##/#../#.#/#.#/.##", "H": "#.#/#.#/###/#.#/#.#",
    "I": "###/.#./.#./.#./###", "K": "#.#/#.#/##./#.#/#.#", "L": "#../#../#../#../###",
    "M": "#.#/###/###/#.#/#.#", "N": "##./#.#/#.#/#.#/#.#", "O": ".#./#.#/#.#/#.#/.#.",
    "P": "##./#.#/##./#../#..", "R": "##./#.#/##./#.#/#.#", "S": ".##/#../.#./..#/##.",
    "T": "###/.#./.#./.#./.#.", "U": "#.#/#.#/#.#/#.#/###", "V": "#.#/#.#/#.#/#.#/.#.",
    "W": "#.#/#.#/###/###/#.#", "X": "#.#/#.#/.#./#.#/#.#", "Y": "#.#/#.#/.#./.#./.#.",
    ".": ".../.../.../.../.#.", "-": ".../.../###/.../...", ":": ".../.#./.../.#./...",
}
# fmt: on
DOT = 2
LINE = 7 * DOT
SCALE_WIDTH = 240
SCALE_WORDS = "TIMES THE MEAN OF THE LAYER"


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    rows: np.ndarray
    """Values [layers, columns] relative to a layer's mean."""
    columns: str
    """What a column is."""


def write_png(path: Path, image: np.ndarray) -> None:
    height, width, _ = image.shape
    raw = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each line begins with its filter: none
    raw[:, 1:] = image.reshape(height, 3 * width)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(raw.tobytes(), 9)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in parts:
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    path.write_bytes(data)


def colour(values: np.ndarray, top: float) -> np.ndarray:
    """RGB for values from 0 to `top`; small differences near the mean are shown larger (square root)."""
    place = np.sqrt(np.clip(values / top, 0, 1)) * (len(COLOURS) - 1)
    low = np.minimum(place.astype(int), len(COLOURS) - 2)
    part = (place - low)[..., None]
    return np.rint(COLOURS[low] * (1 - part) + COLOURS[low + 1] * part).astype(np.uint8)


def draw(panels: Sequence[Panel], width: int = 1400, names: Sequence[int] | None = None) -> np.ndarray:
    """An image of panels side by side, with a scale below; `names`: the number of each layer."""
    layers = len(panels[0].rows)
    names = range(layers) if names is None else names
    total = sum(panel.rows.shape[1] for panel in panels)
    margin, gap = 40, 28
    cell = max(2, min(24, (width - 2 * margin - gap * (len(panels) - 1)) // total))
    tall = int(np.clip(480 // layers, 4, 48))
    top = max(2.0, max(float(panel.rows.max()) for panel in panels))
    widths = [max(cell * panel.rows.shape[1], 4 * DOT * _letters(panel)) for panel in panels]
    scale = 2 * margin + SCALE_WIDTH + 12 + 4 * DOT * len(SCALE_WORDS)
    wide = max(2 * margin + sum(widths) + gap * (len(panels) - 1), scale)
    head, foot = 44, 64
    image = np.full((head + tall * layers + foot, wide, 3), BACKGROUND, dtype=np.uint8)
    left = margin
    for panel, panel_width in zip(panels, widths, strict=True):
        columns = panel.rows.shape[1]
        text(image, left, 12, panel.title.upper(), INK)
        text(image, left, 12 + LINE, _columns(panel).upper(), FAINT)
        cells = colour(panel.rows, top).repeat(tall, 0).repeat(cell, 1)
        if cell >= 6 and tall >= 6:
            cells[::tall] = cells[::tall] // 10 * 9  # thin lines between cells
            cells[:, ::cell] = cells[:, ::cell] // 10 * 9
        image[head : head + tall * layers, left : left + cell * columns] = cells
        left += panel_width + gap
    for layer in range(0, layers, max(1, -(-LINE // tall))):
        text(image, 12, head + layer * tall + max((tall - 5 * DOT) // 2, 0), str(names[layer]), FAINT)
    _scale(image, margin, head + tall * layers + 16, top)
    return image


def _columns(panel: Panel) -> str:
    return f"0-{panel.rows.shape[1] - 1} {panel.columns}"


def _letters(panel: Panel) -> int:
    return max(len(panel.title), len(_columns(panel)))


def _scale(image: np.ndarray, left: int, y: int, top: float) -> None:
    width = SCALE_WIDTH
    image[y : y + 10, left : left + width] = colour(np.linspace(0, top, width)[None], top).repeat(10, 0)
    text(image, left, y + 16, "0", FAINT)
    text(image, left + width - 5 * 4 * DOT, y + 16, f"{top:.1f}", FAINT)
    text(image, left + width + 12, y, SCALE_WORDS, INK)


def text(image: np.ndarray, x: int, y: int, words: str, ink: tuple[int, int, int]) -> None:
    """Write upper-case words; what does not fit into the image is left out."""
    for char in words:
        glyph = GLYPHS.get(char)
        if glyph and x + 3 * DOT <= image.shape[1] and y + 5 * DOT <= image.shape[0]:
            dots = (
                np.array([[dot == "#" for dot in row] for row in glyph.split("/")])
                .repeat(DOT, 0)
                .repeat(DOT, 1)
            )
            image[y : y + 5 * DOT, x : x + 3 * DOT][dots] = ink
        x += 4 * DOT
