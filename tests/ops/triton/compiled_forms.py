"""Compiles the matrix kernels in every form for every architecture, none of which need be there.

    python compiled_forms.py sm_80 gfx942      architectures

--short: the three kernels with most of the work; --few: adapters of the least and the greatest rank alone.

Run by `test_compiles.py`. Prints one line for each kernel: architecture, kernel, bytes of shared memory, what
the model says of them, registers of a thread, bytes (AMD: registers) that were spilled. Triton's own compiler
does it: its ptxas makes machine code, its cuobjdump tells what that takes; AMD's code generator tells in its
text.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeclipse.ops.architecture import ARCHITECTURES, Architecture
from moeclipse.ops.expert_kernels import WIDEST_BLOCK, columns_of, narrow_line
from moeclipse.ops.triton.expert_forward import rows_times_weight, up_gated
from moeclipse.ops.triton.wgrad import grouped_wgrad
from moeclipse.ops.tuning import TABLES, Tile, line_in, shared_memory

TABLES_OF_ROWS = {"tiles": "*i32", "num_tiles": "*i32", "capacity": "i32", "x_stride": "i32"}
ANY_NUMBER = ("capacity", "num_experts")
"""All other sizes are multiples of 16 in real models."""


def compiled(kernel: Any, types: dict[str, str], flags: dict[str, Any], tile: Tile, on: Architecture) -> Any:
    names = kernel.arg_names
    aligned = [
        name for name, kind in types.items() if kind[0] == "*" or (kind == "i32" and name not in ANY_NUMBER)
    ]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): flags.get(name) for name in names if name not in types},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", int(on.name[3:]), 32) if on.vendor == "cuda" else GPUTarget("hip", on.name, 64)
    return triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages})


def usage(built: Any) -> tuple[int, int]:
    """(registers of a thread, what was spilled)."""
    if "amdgcn" in built.asm:
        text = built.asm["amdgcn"]
        found = [re.search(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")]
    else:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [str(tool), "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = [re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK")]
    registers, spilled = (int(each[1]) for each in found if each)
    return registers, spilled


def block(tile: Tile, kind: str, *shape: int) -> str:
    """An operand of blocks: a pointer, or a descriptor."""
    return f"*{kind}" if tile.pointers else f"tensordesc<{kind}{list(shape)}>"


def flags_of(tile: Tile, rank: int, *, gather: bool, bias: bool) -> dict[str, Any]:
    return {
        "BIAS": bias, "RANK": rank, "GATHER": gather, "POINTERS": tile.pointers, "EVEN": True,
        "FLATTEN": tile.flatten, "GROUP": tile.group, "STAGGER": tile.stagger, "PROGRAMS": 132,
        "BM": tile.m, "BN": tile.n, "BK": tile.k, "BR": min(columns_of(rank), WIDEST_BLOCK),
    }  # fmt: skip


def operands(tile: Tile, *, gather: bool, bias: bool) -> dict[str, str]:
    types = {"x": "*bf16" if gather else block(tile, "bf16", tile.m, tile.k), **TABLES_OF_ROWS}
    return types | ({"index": "*i32"} if gather else {}) | ({"bias": "*bf16"} if bias else {})


def up(tile: Tile, on: Architecture, rank: int = 0, *, gather: bool = True, bias: bool = False) -> Any:
    types, narrow = operands(tile, gather=gather, bias=bias), min(columns_of(rank), WIDEST_BLOCK)
    types |= {"w": block(tile, "bf16", 1, 2, tile.n, tile.k), "D": "i32", "F": "i32"}
    types |= dict.fromkeys(("gate_out", "up_out", "a_out"), block(tile, "bf16", 1, 1, tile.m, tile.n))
    if rank:
        types |= {"u": block(tile, "bf16", tile.m, narrow), "b": block(tile, "bf16", 1, 2, tile.n, narrow)}
    return compiled(
        up_gated, types, flags_of(tile, rank, gather=gather, bias=bias) | {"ACT": "swiglu"}, tile, on
    )


def product(
    tile: Tile, on: Architecture, rank: int = 0, *,
    transposed: bool, gather: bool = False, act: str = "none", scaled: bool = False,
) -> Any:  # fmt: skip
    narrow, bias = min(columns_of(rank), WIDEST_BLOCK), act != "none"
    types = operands(tile, gather=gather, bias=bias) | {"K": "i32", "N": "i32", "scale": "fp32"}
    types["out"] = block(tile, "bf16", 1, 1, tile.m, tile.n // tile.split)
    types |= {"a_out": types["out"]} if act != "none" else {}

    def weight(columns: int) -> str:
        return block(tile, "bf16", *([tile.n, columns] if transposed else [1, columns, tile.n]))

    types["w"] = weight(tile.k)
    types |= {"u": block(tile, "bf16", tile.m, narrow), "b": weight(narrow)} if rank else {}
    flags = flags_of(tile, rank, gather=gather, bias=bias)
    flags |= {"ACT": act, "SCALED": scaled, "TRANSPOSED": transposed, "SPLIT": tile.split}
    return compiled(rows_times_weight, types, flags, tile, on)


def wgrad(tile: Tile, on: Architecture, gather: str, *, add: bool) -> Any:
    wide_dy, wide_x = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
    piece = [tile.n // tile.split, tile.m] if tile.swap else [tile.m, tile.n // tile.split]
    types = {
        "dy": "*bf16" if gather == "dy" else block(tile, "bf16", 1, 1, tile.k, wide_dy),
        "x": "*bf16" if gather == "x" else block(tile, "bf16", 1, 1, tile.k, wide_x),
        "out": block(tile, "fp32" if add else "bf16", 1, *piece), "offsets": "*i32",
        **dict.fromkeys(("dy_stride", "x_stride", "num_experts", "N", "D"), "i32"),
    }  # fmt: skip
    types |= {f"{gather}_index": "*i32"} if gather != "none" else {}
    mode = ("add" if tile.pointers else "reduce") if add else "store"
    flags = {
        "GATHER_DY": gather == "dy", "GATHER_X": gather == "x", "POINTERS": tile.pointers, "EVEN": True,
        "MODE": mode, "FLATTEN": tile.flatten, "AHEAD": tile.ahead, "SWAP": tile.swap, "GROUP": tile.group,
        "STAGGER": tile.stagger, "PROGRAMS": 132, "PADDED": 128,
        "BM": tile.m, "BN": tile.n, "BK": tile.k, "SPLIT": tile.split,
    }  # fmt: skip
    return compiled(grouped_wgrad, types, flags, tile, on)


def every_kernel(on: Architecture, *, short: bool, few: bool) -> Iterator[tuple[str, Tile, Any]]:
    """(line, tile, what was compiled)."""
    table = TABLES[on.table]

    def tile_of(line: str) -> Tile:
        return table[line_in(table, line, 2048, 768)]

    yield "up", tile_of("up"), up(tile_of("up"), on)
    yield "down", tile_of("down"), product(tile_of("down"), on, transposed=True)
    yield "wgrad_x, add", tile_of("wgrad_x, add"), wgrad(tile_of("wgrad_x, add"), on, "x", add=True)
    if short:
        return
    yield "up, in order, biased", tile_of("up"), up(tile_of("up"), on, gather=False, bias=True)
    yield "few up", tile_of("few up"), up(tile_of("few up"), on)
    yield "few down", tile_of("few down"), product(tile_of("few down"), on, transposed=True)
    no_gate = tile_of("up, no gate")
    yield "up, no gate", no_gate, product(no_gate, on, transposed=True, gather=True, act="gelu")
    yield "d_hidden", tile_of("d_hidden"), product(tile_of("d_hidden"), on, transposed=False, gather=True)
    yield "d_rows", tile_of("d_rows"), product(tile_of("d_rows"), on, transposed=False)
    for line, gather in (("wgrad", "none"), ("wgrad_dy", "dy"), ("wgrad_x", "x")):
        yield line, tile_of(line), wgrad(tile_of(line), on, gather, add=False)
        if gather != "x":
            yield (
                f"{line}, add",
                tile_of(f"{line}, add"),
                wgrad(tile_of(f"{line}, add"), on, gather, add=True),
            )
    narrow = replace(tile_of("wgrad_narrow"), n=64)
    yield "wgrad_narrow", narrow, wgrad(narrow, on, "none", add=True)
    for rank in (16, 256) if few else (16, 64, 128, 256):
        tile = tile_of("up and adapter")
        yield f"up and adapter, rank {rank}", tile, up(tile, on, rank, gather=False)
        for kernel, transposed in (("down", True), ("d_hidden", False)):
            tile = tile_of(f"{kernel} and adapter")
            yield f"{kernel} and adapter, rank {rank}", tile, product(tile, on, rank, transposed=transposed)
        tile = replace(tile_of(narrow_line(rank)), n=columns_of(rank))
        for transposed in (True, False):
            built = product(tile, on, transposed=transposed, scaled=True)
            yield f"narrow, {'A' if transposed else 'B'}, rank {rank}", tile, built


if __name__ == "__main__":
    words = sys.argv[1:]
    for name in (word for word in words if word in ARCHITECTURES):
        on = ARCHITECTURES[name]
        for line, tile, built in every_kernel(on, short="--short" in words, few="--few" in words):
            took = (built.metadata.shared, shared_memory(line, tile, on), *usage(built))
            print("\t".join([name, line, *map(str, took)]), flush=True)
