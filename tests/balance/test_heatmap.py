"""PNG files that decode to what was drawn, and colours that rise with the load."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from moeclipse.balance.heatmap import Panel, colour, draw, write_png


def decode(data: bytes) -> np.ndarray:
    """A tiny reader for what `write_png` may write: checks every checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 8 : place + 8 + size]
        (check,) = struct.unpack(">I", data[place + 8 + size : place + 12 + size])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + size
    width, height, depth, kind_of_colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, kind_of_colour) == (8, 2)
    raw = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, 1 + 3 * width)
    assert not raw[:, 0].any()
    return raw[:, 1:].reshape(height, width, 3)


def test_round_trip(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (13, 7, 3)).astype(np.uint8)
    write_png(tmp_path / "x.png", image)
    assert np.array_equal(decode((tmp_path / "x.png").read_bytes()), image)


def test_brighter_means_more() -> None:
    shades = colour(np.linspace(0, 5, 50), 5.0).astype(int).sum(-1)
    assert (np.diff(shades) > 0).all()


def test_panels_fit_from_one_cell_to_many() -> None:
    for layers, experts in ((1, 1), (3, 32), (61, 256), (200, 700)):
        rows = np.random.default_rng(0).random((layers, experts)) * 3
        image = draw(
            [Panel(title="load", rows=rows, columns="experts"), Panel(title="b", rows=rows, columns="c")]
        )
        assert image.dtype == np.uint8
        assert image.shape[0] < 1000
        assert image.shape[1] < 3200
        assert len(np.unique(image @ np.array([1, 256, 65536]))) > 3
