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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moeclipse.core.outside import read_table


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
    stagger: int = 0
    """Programs begin spread over one tile, whose steps take about this many nanoseconds; 0: together."""
    staging: int = 0
    """Weight gradients on Hopper: some warps only load, and each half of a tile is written through so many
    buffers of 64 x n / split elements, a divisor of its pieces; 0: all warps do everything in turn."""


TABLE = {
    "up": Tile(n=128, stages=4, flatten=True, stagger=800),
    "up, huge": Tile(n=128, stages=4, flatten=True),
    "up, no gate": Tile(stages=3, flatten=True, split=2),
    "down": Tile(stages=4, flatten=True, split=2, stagger=800),
    "down, small": Tile(stages=4, flatten=True, split=2),
    "down, huge": Tile(stages=4, flatten=True, split=2),
    "d_rows": Tile(stages=4, flatten=True, split=2, group=4, stagger=400),
    "d_rows, small": Tile(stages=4, flatten=True, split=2, group=4),
    "d_rows, huge": Tile(stages=4, flatten=True, split=2, group=4),
    "d_hidden": Tile(stages=3, flatten=True, stagger=400),
    "d_hidden, small": Tile(stages=3, flatten=True, stagger=800),
    "d_hidden, huge": Tile(stages=3, flatten=True),
    # With an adapter's product behind the sum, whose operands take a stage's shared memory.
    "up and adapter": Tile(n=128, stages=3, flatten=True, stagger=800),
    "up, no gate and adapter": Tile(stages=3, flatten=True, split=2),
    "down and adapter": Tile(stages=3, flatten=True, split=2, stagger=800),
    "d_rows and adapter": Tile(stages=3, flatten=True, split=2, group=4, stagger=400),
    "d_hidden and adapter": Tile(stages=3, flatten=True, split=2, stagger=400),
    "narrow": Tile(n=16, k=128, stages=4, warps=4),
    "narrow, 256 columns": Tile(n=256, stages=3, split=2),
    # Weight gradients: written in bf16, or added to fp32 sums.
    "wgrad": Tile(stages=4, split=4, flatten=True),
    "wgrad, add": Tile(stages=4, split=4, flatten=True, stagger=900),
    "wgrad, add, huge": Tile(stages=4, split=4, flatten=True, stagger=700),
    "wgrad_dy": Tile(stages=5, split=4, stagger=800),
    "wgrad_dy, small": Tile(stages=5, split=4),
    "wgrad_dy, add": Tile(stages=5, split=4, stagger=1100),
    "wgrad_x": Tile(stages=5, split=4, swap=True, stagger=800),
    "wgrad_x, medium": Tile(stages=5, split=4, swap=True, stagger=400),
    "wgrad_x, add": Tile(stages=5, split=4, swap=True, stagger=1100),
    # Few experts with huge gradients: row numbers are read ahead.
    "wgrad_dy, huge": Tile(stages=4, split=4, ahead=True),
    "wgrad_dy, add, huge": Tile(stages=4, split=4, ahead=True, stagger=800),
    "wgrad_x, huge": Tile(stages=4, split=4, swap=True, ahead=True),
    "wgrad_x, add, huge": Tile(stages=4, split=4, swap=True, ahead=True, stagger=800),
    "wgrad_narrow": Tile(m=128, n=16, stages=5, warps=4, per_sm=3),
    # The same where warps divide the work.
    "wgrad_roles": Tile(stages=4, split=4, staging=2, stagger=900),
    "wgrad_roles, add": Tile(k=32, stages=8, split=8, staging=2, stagger=450),
    "wgrad_roles_dy": Tile(stages=4, split=4, staging=2, stagger=450),
    "wgrad_roles_dy, add": Tile(stages=4, split=8, staging=2, stagger=900),
    "wgrad_roles_x": Tile(m=256, n=128, stages=4, split=2, staging=2),
    "wgrad_roles_x, add": Tile(stages=4, split=8, staging=2, stagger=900),
}
CLASSES = (("huge", 8192), ("wide", 4096), ("medium", 2048), ("small", 0))
SHARED_MEMORY = 227 * 1024
DEFAULT_FILE = Path("~/.cache/moeclipse/tiles.json")


def shape_class(kernel: str, *widths: int) -> str:
    """The line of the table for a kernel and its weight: by the wider width, where that has a line.

    ("wgrad_x", 28672, 4096) -> "wgrad_x, huge" · ("down", 2048, 768) -> "down"
    """
    widest = max(widths)
    name = next((name for name, least in CLASSES if widest >= least), "")
    line = f"{kernel}, {name}"
    return line if line in TABLE else kernel


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
    _read.cache_clear()
    entries = dict(_read(file))
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
def device_fits(device: torch.device) -> bool:
    """Whether a device has the copy engine and the shared memory that the table's tiles are made for."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY)  # not every torch tells
    return properties.major in (9, 10) and room >= SHARED_MEMORY


@functools.cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether a kernel's warps may divide the work: on Hopper, with a Triton that has Gluon for it."""
    if not device_fits(device) or torch.cuda.get_device_properties(device).major != 9:
        return False
    try:
        from moeclipse.ops.triton import wgrad_gluon  # noqa: F401
    except (ImportError, AttributeError):  # names in Gluon still change
        return False
    return True


def delay(tile: Tile, device: torch.device, num_tiles: int) -> int:
    """Programs begin apart only where each has so many tiles that waiting for one of them hardly counts."""
    many = tile.stagger and device.type == "cuda" and num_tiles >= 10 * num_programs(tile, device) > 0
    return tile.stagger if many else 0


@functools.cache
def _read(file: Path) -> dict[str, dict[str, Any]]:
    path = file.expanduser()
    try:
        return read_table(path)
    except (OSError, ValueError):
        return {}
