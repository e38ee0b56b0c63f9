"""Compiles the experts' products with adapters of every rank for Hopper, which need not be there.

Run by `test_compiles.py`. Prints one line for each kernel and rank: bytes of shared memory, and of PTX.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeclipse.ops.expert_kernels import WIDEST_BLOCK, columns_of, narrow_line
from moeclipse.ops.grouping import ROW_TILE
from moeclipse.ops.triton.expert_forward import rows_times_weight, up_gated
from moeclipse.ops.tuning import TABLE, Tile

HOPPER = GPUTarget("cuda", 90, 32)
TABLES = {"tiles": "*i32", "num_tiles": "*i32", "capacity": "i32", "x_stride": "i32"}


def block(*shape: int) -> str:
    return f"tensordesc<bf16{list(shape)}>"


def compiled(kernel: Any, types: dict[str, str], flags: dict[str, Any], tile: Tile) -> str:
    names = kernel.arg_names
    fixed = {name: flags.get(name) for name in names if name not in types}
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = triton.compile(source, target=HOPPER, options=options)
    return f"{built.metadata.shared}\t{len(built.asm['ptx'])}"


def flags_of(tile: Tile, rank: int) -> dict[str, Any]:
    width = min(columns_of(rank), WIDEST_BLOCK)
    return {
        "BIAS": False, "RANK": rank, "GATHER": False, "EVEN": True, "FLATTEN": tile.flatten,
        "GROUP": tile.group, "STAGGER": tile.stagger, "PROGRAMS": 132, "BM": ROW_TILE, "BN": tile.n,
        "BK": tile.k, "BR": width,
    }  # fmt: skip


def up(rank: int) -> str:
    tile = TABLE["up and adapter"]
    width, out = min(columns_of(rank), WIDEST_BLOCK), block(1, 1, ROW_TILE, tile.n)
    types = {"x": block(ROW_TILE, tile.k), "w": block(1, 2, tile.n, tile.k), **TABLES, "D": "i32", "F": "i32"}
    types |= {"u": block(ROW_TILE, width), "b": block(1, 2, tile.n, width)}
    types |= {"gate_out": out, "up_out": out, "a_out": out}
    return compiled(up_gated, types, flags_of(tile, rank) | {"ACT": "swiglu"}, tile)


def product(tile: Tile, rank: int, *, transposed: bool, scaled: bool = False) -> str:
    width = min(columns_of(rank), WIDEST_BLOCK)
    types = {"x": block(ROW_TILE, tile.k), **TABLES, "scale": "fp32", "K": "i32", "N": "i32"}
    types["w"] = block(tile.n, tile.k) if transposed else block(1, tile.k, tile.n)
    types["out"] = block(1, 1, ROW_TILE, tile.n // tile.split)
    if rank:
        types |= {"u": block(ROW_TILE, width)}
        types |= {"b": block(tile.n, width) if transposed else block(1, width, tile.n)}
    flags = flags_of(tile, rank) | {
        "ACT": "none",
        "SCALED": scaled,
        "TRANSPOSED": transposed,
        "SPLIT": tile.split,
    }
    return compiled(rows_times_weight, types, flags, tile)


if __name__ == "__main__":
    for rank in map(int, sys.argv[1:] or ("16", "64", "128", "256")):
        print(f"up\t{rank}\t{up(rank)}", flush=True)
        for kernel, transposed in (("down", True), ("d_hidden", False), ("d_rows", False)):
            tile = TABLE[f"{kernel} and adapter"]
            print(f"{kernel}\t{rank}\t{product(tile, rank, transposed=transposed)}", flush=True)
        for transposed in (True, False):
            tile = replace(TABLE[narrow_line(rank)], n=columns_of(rank))
            print(
                f"narrow {transposed}\t{rank}\t{product(tile, 0, transposed=transposed, scaled=True)}",
                flush=True,
            )
