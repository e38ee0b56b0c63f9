"""Which tile a matrix kernel uses: a small table, and a file that overrides it.

A `Tile` is everything about a launch that changes speed and nothing about results' meaning. The table below was
measured on one H200; `tune` measures again on any device and keeps the winners in a JSON file, keyed by
device, Triton version, kernel and shape class, which later processes read once.

Hazard: another tile may add in another order, so bits may differ between devices or after tuning; on one
device with one file they do not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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


TABLE = {
    "up": Tile(n=128, stages=4, flatten=True),
    "down": Tile(stages=4, flatten=True, split=2),
    "d_rows": Tile(stages=4, flatten=True, split=2, group=4),
    "d_hidden": Tile(stages=3, flatten=True),
    "wgrad_dy": Tile(stages=5, split=4),
    "wgrad_x": Tile(stages=4, split=4, swap=True, ahead=True),
    "wgrad": Tile(stages=4, split=4),
}
DEFAULT_FILE = Path("~/.cache/moeclipse/tiles.json")


def tile_for(kernel: str, device: torch.device, *widths: int, file: Path = DEFAULT_FILE) -> Tile:
    """The tile of a kernel for these widths: from the file if it was tuned there, else from the table."""
    tuned = _read(file).get(key_of(kernel, device, *widths))
    return Tile(**tuned) if tuned else TABLE[kernel]


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

    best, best_ms = TABLE[kernel], float("inf")
    for tile in candidates:
        try:
            ms = do_bench(lambda tile=tile: run(tile), warmup=5, rep=30, return_mode="median")
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
def _read(file: Path) -> dict[str, dict[str, int]]:
    path = file.expanduser()
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
