"""Which tile a matrix kernel uses: a small table, and a file that overrides it.

A `Tile` is everything about a launch that changes speed and nothing about what is computed. The table was
measured on one H200; `tune` measures again on any device and keeps the winners in a JSON file, keyed by
device, Triton version, kernel and widths, which later processes read once.

Hazard: another tile may add in another order, so bits may differ between devices or after tuning; on one
device with one file they do not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Tile:
    m: int = 128
    n: int = 256
    k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    flatten: bool = False
    """Overlap one tile's stores with the next one's loads."""
    split: int = 1
    """Pieces in which the columns of a tile are written: fewer registers, less shared memory."""
    per_sm: int = 1
    """Programs for each multiprocessor; 0 starts one for each tile (weight gradients only)."""
    ahead: bool = False
    """Weight gradients: row numbers are read one step ahead into registers."""
    swap: bool = False
    """Weight gradients: multiply x^T dy and turn the tile over when it is written."""


NARROW = 128  # a tile of 128 x 128 with 4 warps: two programs share a multiprocessor
TABLE = {
    "up": Tile(n=128, stages=4, flatten=True),
    "down": Tile(stages=4, flatten=True, split=2),
    "d_rows": Tile(stages=4, flatten=True, split=2, group=4),
    "d_hidden": Tile(stages=3, flatten=True),
    "wgrad": Tile(stages=4, split=4, flatten=True),
    "wgrad_dy": Tile(stages=5, split=4, per_sm=0),
    "wgrad_x": Tile(stages=5, split=4, swap=True),
    # Rows wide enough that two programs hide each other's reading of row numbers and writing of sums.
    "wgrad_dy, wide": Tile(n=NARROW, warps=4, stages=3, split=4, per_sm=0, ahead=True),
    "wgrad_x, wide": Tile(n=NARROW, warps=4, stages=3, split=4, per_sm=0, ahead=True),
    # Few experts with huge gradients: larger tiles read less.
    "wgrad_x, huge": Tile(stages=4, split=4, swap=True, ahead=True),
}
WIDE_DY, WIDE_X, HUGE = 4096, 2048, 8192
DEFAULT_FILE = Path("~/.cache/moeclipse/tiles.json")


def shape_class(kernel: str, *widths: int) -> str:
    """The line of the table: gathered weight gradients [N, D] differ by their widths, the others do not.

    ("wgrad_x", 2048, 4096) -> "wgrad_x, wide" · ("wgrad_dy", 2048, 768) -> "wgrad_dy"
    """
    if kernel == "wgrad_dy" and widths[0] >= WIDE_DY:
        return "wgrad_dy, wide"
    if kernel == "wgrad_x" and widths[0] >= HUGE:
        return "wgrad_x, huge"
    if kernel == "wgrad_x" and widths[1] >= WIDE_X:
        return "wgrad_x, wide"
    return kernel


def tile_for(kernel: str, device: torch.device, *widths: int, file: Path = DEFAULT_FILE) -> Tile:
    """The tile of a kernel for these widths: from the file if it was tuned there, else from the table."""
    tuned = _read(file)
    found = tuned.get(key_of(kernel, device, *widths)) if tuned else None
    return Tile(**found) if found else TABLE[shape_class(kernel, *widths)]


def key_of(kernel: str, device: torch.device, *widths: int) -> str:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return "|".join([name, f"triton {triton.__version__}", kernel, *map(str, widths)])


def tune(
    kernel: str,
    device: torch.device,
    widths: tuple[int, ...],
    candidates: Iterable[Tile],
    run: Callable[[Tile], object],
    file: Path = DEFAULT_FILE,
) -> Tile:
    """Time `run` with each candidate, keep the fastest in the file, and return it."""
    from triton.testing import do_bench

    best, best_ms = TABLE[shape_class(kernel, *widths)], float("inf")
    for tile in candidates:
        try:
            ms = do_bench(functools.partial(run, tile), warmup=5, rep=30, return_mode="median")
        except Exception:  # a tile that does not fit the device is no candidate
            continue
        if ms < best_ms:
            best, best_ms = tile, ms
    path = file.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(path.read_text()) if path.exists() else {}
    entries[key_of(kernel, device, *widths)] = asdict(best)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(entries, indent=1, sort_keys=True))
    fresh.replace(path)
    _read.cache_clear()
    return best


def variants(tile: Tile, **choices: Iterable[object]) -> list[Tile]:
    """`tile` with every combination of the given field values."""
    tiles = [tile]
    for field, values in choices.items():
        tiles = [replace(t, **{field: value}) for t in tiles for value in values]  # type: ignore[arg-type]
    return tiles


def num_programs(tile: Tile, device: torch.device) -> int:
    """Persistent kernels start this many programs; without a device (the interpreter) two are enough."""
    if device.type != "cuda":
        return 2
    return tile.per_sm * torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _read(file: Path) -> dict[str, dict[str, Any]]:
    path = file.expanduser()
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
