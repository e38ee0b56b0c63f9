"""Which tile a matrix kernel uses: a table for each architecture, and a file that overrides it.

A `Tile` is everything about a launch that changes speed and nothing about what is computed. Hopper's tables
were measured on one H200; the others are tiles that a model of shared memory and registers lets pass
(`fits`), which tests hold against what compilers say. `tune` measures on any device and keeps the winners in
a JSON file, keyed by device, Triton version, kernel and widths, which later processes read once.

Hazard: another tile may add in another order, so bits may differ between devices or after tuning; on one
device with one file they do not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from moeclipse.core.outside import read_table
from moeclipse.core.values import Mismatch, convert_table
from moeclipse.ops.architecture import KIB, Architecture, architecture_of


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
    """Programs for each multiprocessor; 0 starts one for each tile."""
    ahead: bool = False
    """Weight gradients: row numbers are read one step ahead into registers."""
    swap: bool = False
    """Weight gradients: multiply x^T dy and turn the tile over when it is written."""
    stagger: int = 0
    """Programs begin spread over one tile, whose steps take about this many nanoseconds; 0: together."""
    staging: int = 0
    """Weight gradients on Hopper: some warps only load, and each half of a tile is written through so many
    buffers of 64 x n / split elements, a divisor of its pieces; 0: all warps do everything in turn."""
    pointers: bool = False
    """Threads copy what is loaded and stored; else the copy engine does, where it can."""


HOPPER = {
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
DEFAULT_FILE = Path("~/.cache/moeclipse/tiles.json")


FEW = dict.fromkeys(
    ("few up", "few product"), Tile(m=16, n=64, k=64, warps=4, stages=3, per_sm=0, pointers=True)
)
"""Where no expert has more rows than a tile, so that weights are all that is read."""
MANY_STAGES = {
    "few up": replace(FEW["few up"], k=128, stages=5),
    "few product": replace(FEW["few product"], k=128, warps=2, stages=4),
}
"""The same where shared memory has room for more of them on their way."""


def _pointers(gated: Tile, product: Tile, wgrad: Tile) -> dict[str, Tile]:
    """A table of the pointer form: one line for each family of kernels, see `line_in`."""
    lines = {
        "up": gated,
        "product": product,
        "wgrad": wgrad,
        "narrow": replace(product, n=16, warps=4, split=1),
        "narrow, 256 columns": replace(product, n=256, k=32, warps=8, stages=3, split=2),
        "wgrad_narrow": replace(wgrad, n=16, warps=4, split=1),
    }
    return FEW | {line: replace(tile, pointers=True) for line, tile in lines.items()}


PRODUCTS = ("up, no gate", "down", "d_hidden", "d_rows")
SMALL = _pointers(
    Tile(n=64, k=64, stages=3, per_sm=0),
    Tile(n=128, k=64, stages=3, per_sm=0),
    Tile(n=128, k=64, stages=3, per_sm=0, split=2, ahead=True),
)
"""Of GPUs with 99 KiB for a block."""

TABLES: dict[str, dict[str, Tile]] = {
    # Two blocks on a multiprocessor: one computes while the other writes.
    "sm_80": _pointers(
        Tile(n=64, stages=3, warps=4, per_sm=0),
        Tile(n=128, stages=3, warps=4, per_sm=0),
        Tile(n=128, stages=3, warps=4, per_sm=0, split=2, ahead=True),
    )
    # More is added or written: four warps have no registers left for it.
    | dict.fromkeys(("up, no gate", *(f"{name} and adapter" for name in PRODUCTS)), SMALL["product"])
    | {"up and adapter": SMALL["up"]},
    "sm_86": SMALL,
    "sm_89": SMALL,
    "sm_90": HOPPER | MANY_STAGES,
    "sm_90, pointers": _pointers(
        Tile(n=128, stages=4), Tile(stages=4, split=2), Tile(stages=4, split=4, ahead=True)
    ),
    # How long a step takes there nobody has measured, so programs begin together. The compiler cannot make
    # one loop of tiles and steps where a second product follows the first: sums lie in tensor memory.
    "sm_100": {
        line: replace(tile, stagger=0, flatten=tile.flatten and "adapter" not in line)
        for line, tile in HOPPER.items()
        if "roles" not in line
    }
    | MANY_STAGES,
    "sm_120": SMALL,
    "gfx942": _pointers(
        Tile(n=128, stages=2, per_sm=0),
        Tile(n=256, stages=2, per_sm=0, split=2),
        Tile(n=128, stages=2, per_sm=0, split=2, ahead=True),
    ),
}


def columns_in(line: str, tile: Tile) -> int:
    """Columns of a tile's sum: those of the gate and of the up-projection stand side by side."""
    gated = line.removeprefix("few ").startswith("up") and "no gate" not in line
    return 2 * tile.n if gated else tile.n


def shared_memory(line: str, tile: Tile, on: Architecture) -> int:
    """Bytes of shared memory that a tile takes, at most: what compilers say is no more.

    Loads of `stages` steps are under way at once, less where each waits for a row number that is loaded, too;
    tensor cores that read shared memory by themselves (Hopper, Blackwell) hold one step more. What is written
    passes through shared memory as well: behind the last product where threads do it, beside the next tile's
    loads where the copy engine does.
    """
    columns = columns_in(line, tile)
    gathered = line.startswith(("wgrad_x", "wgrad_dy")) and not (tile.ahead or tile.flatten)
    steps = (tile.stages - 1) // 2 if gathered else tile.stages - 1
    if on.name in ("sm_90", "sm_100"):
        steps += 1
    blocks = steps * (tile.m + columns) * tile.k * 2
    size = 4 if line.startswith("wgrad") else 2
    written = tile.m * tile.n // tile.split * size
    narrow = (tile.m + columns) * 64 * 2 if "adapter" in line else 0
    if tile.staging:
        ring = tile.stages * (tile.m + tile.n) * tile.k * 2
        return ring + 2 * tile.staging * 64 * tile.n // tile.split * (4 if "add" in line else 2) + KIB
    return (max(blocks, written, narrow) if tile.pointers else blocks + written + narrow) + KIB


def sums(line: str, tile: Tile, on: Architecture) -> int:
    """Registers of a thread that hold its part of a tile's sum."""
    return tile.m * columns_in(line, tile) // (tile.warps * on.warp)


def fits(line: str, tile: Tile, on: Architecture) -> bool:
    """Whether a tile is worth a compiler's time: room in shared memory, half of the registers for the sum.

    The other half holds addresses, operands on their way, and what is written.
    """
    return shared_memory(line, tile, on) <= on.shared and sums(line, tile, on) <= (on.registers + 1) // 2


def candidates(line: str, on: Architecture) -> list[Tile]:
    """Tiles to measure for a kernel of an architecture, in its form: those of the table, and what fits."""
    table = TABLES[on.table]
    usual = table[line_in(table, line, 0)]
    if usual.staging:
        return [usual]
    if line.startswith("few"):
        small = {"n": (16, 32, 64), "k": (64, 128, 256), "warps": (1, 2, 4), "stages": (3, 4, 5)}
        return [usual, *(tile for tile in variants(usual, **small) if fits(line, tile, on))]
    wide = (32, 64, 128) if columns_in(line, usual) > usual.n else (64, 128, 256)
    choices = {"n": wide, "k": (32, 64), "warps": (4, 8), "stages": (2, 3, 4), "per_sm": (0, 1)}
    others = [
        replace(tile, split=min(split, tile.n // 64) if (split := usual.split) > 1 else 1)
        for tile in variants(usual, **choices)
    ]
    # Sums of fewer registers read each operand too often.
    return [usual, *(tile for tile in others if fits(line, tile, on) and sums(line, tile, on) >= 32)]


def line_in(table: dict[str, Tile], kernel: str, *widths: int) -> str:
    """The line of a table for a kernel and its weight: by the wider width, where that has a line.

    Hopper's ("wgrad_x", 28672, 4096) -> "wgrad_x, huge" · ("down", 2048, 768) -> "down". Tables with few
    lines have one for a family: ("wgrad_x, add", ...) -> "wgrad" · ("down and adapter", ...) -> "product".
    """
    widest = max(widths)
    name = next((name for name, least in CLASSES if widest >= least), "")
    plain = kernel.removesuffix(" and adapter").removesuffix(", add")
    family = "wgrad" if plain.startswith("wgrad") else "few product" if plain.startswith("few") else "product"
    lines = (f"{kernel}, {name}", kernel, f"{plain}, {name}", plain, f"{family}, {name}", family)
    return next(line for line in lines if line in table)


def table_of(device: torch.device) -> dict[str, Tile]:
    """The tiles of a device; without one (the interpreter) those of Hopper."""
    return TABLES[_table_name(device)]


def _table_name(device: torch.device) -> str:
    found = architecture_of(device)
    return found.table if found else "sm_90"


def tile_for(kernel: str, device: torch.device, *widths: int, file: Path = DEFAULT_FILE) -> Tile:
    """The tile of a kernel for these widths: from the file if it was tuned there, else from the table."""
    return _tile_in(_table_name(device), kernel, device, widths, file)


@functools.lru_cache(maxsize=1 << 12)
def _tile_in(name: str, kernel: str, device: torch.device, widths: tuple[int, ...], file: Path) -> Tile:
    tuned = _read(file)
    found = tuned.get(key_of(kernel, device, *widths)) if tuned else None
    return found or TABLES[name][line_in(TABLES[name], kernel, *widths)]


def key_of(kernel: str, device: torch.device, *widths: int) -> str:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = architecture_of(device)
    form = [] if found is None or found.form == "descriptor" else ["pointers"]
    return "|".join([name, f"triton {triton.__version__}", kernel, *map(str, widths), *form])


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

    table = table_of(device)
    best, best_ms = table[line_in(table, kernel, *widths)], float("inf")
    for tile in candidates:
        try:
            ms = do_bench(functools.partial(run, tile), warmup=5, rep=30, return_mode="median")
        except Exception:  # a tile that does not fit the device is no candidate
            continue
        if ms < best_ms:
            best, best_ms = tile, ms
    path = file.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    _forget()
    entries = {**_read(file), key_of(kernel, device, *widths): best}
    fresh = path.with_suffix(".new")
    told = {key: asdict(tile) for key, tile in entries.items()}
    fresh.write_text(json.dumps(told, indent=1, sort_keys=True))
    fresh.replace(path)
    _forget()
    return best


def _forget() -> None:
    _read.cache_clear()
    _tile_in.cache_clear()


def variants(tile: Tile, **choices: Iterable[object]) -> list[Tile]:
    """`tile` with every combination of the given field values."""
    tiles = [tile]
    for field, values in choices.items():
        tiles = [replace(t, **{field: value}) for t in tiles for value in values]  # type: ignore[arg-type]
    return tiles


def num_programs(tile: Tile, device: torch.device) -> int:
    """Persistent kernels start this many programs; without a device (the interpreter) two are enough."""
    return tile.per_sm * _multiprocessors(device) if device.type == "cuda" else 2


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_of(tile: Tile, device: torch.device, num_tiles: int) -> tuple[int, int]:
    """(programs to start, PROGRAMS of the kernel); a program works on every PROGRAMS-th tile."""
    if tile.per_sm:
        return num_programs(tile, device), num_programs(tile, device)
    # Where each tile has a program of its own, their number must not make another kernel.
    return num_tiles, 1 << 30


def device_fits(device: torch.device) -> bool:
    """Whether the kernels run on a device, in one form or the other."""
    return architecture_of(device) is not None


def has_warpgroups(device: torch.device) -> bool:
    """Whether a kernel's warps may divide the work: on Hopper, with a Triton that has Gluon for it."""
    found = architecture_of(device)
    return found is not None and found.table == "sm_90" and _has_gluon()


@functools.cache
def _has_gluon() -> bool:
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
def _read(file: Path) -> dict[str, Tile]:
    """What is no tile is left out: without it kernels run as in the table."""
    found: dict[str, Tile] = {}
    with suppress(OSError, ValueError):
        for key, value in read_table(file.expanduser()).items():
            with suppress(Mismatch):
                found[key] = convert_table(value, Tile)
    return found
