"""Compiles what decodes frozen matrices for Hopper, which need not be there; run by `test_compiles.py`.

Prints one line for each kernel: how often its PTX writes 16 bytes, how often less, and how often it rounds
two operations as one or takes small numbers for zero.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeclipse.ops import block_floats, nf4
from moeclipse.ops.quantised import WARPS, WORDS
from moeclipse.ops.triton.quantised import decode_fp8, decode_mxfp4, decode_nf4

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = ("first", "pitch", "count", "spans", "blocks", "groups", "stop", "height", "width", "down", "across")
NUMBERS = dict.fromkeys((*SIZES, "scale_rows", "scale_columns"), "i32")
NIBBLES = {"codes": "*i32", "table": "*fp32", "out": "*bf16", "dynamic_map": "*fp32", "factors": "*u8"}
TILE = dict(zip(("ROWS", "COLUMNS"), block_floats.TILE, strict=True))
SIDES = dict(zip(("BLOCK_ROWS", "BLOCK_COLUMNS"), block_floats.SIDES, strict=True))
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, int]]] = {
    "nf4": (
        decode_nf4,
        NIBBLES | {"scales": "*fp32", "offsets": "*fp32"},
        {"GROUP": nf4.GROUP, "SMALL": False, "WORDS": WORDS},
    ),
    "mxfp4": (decode_mxfp4, NIBBLES | {"scales": "*u8"}, {"WORDS": WORDS}),
    "fp8": (decode_fp8, {"codes": "*u8", "scales": "*fp32", "out": "*bf16"}, TILE | SIDES),
}
ALIGNED = {"codes", "factors", "scales", "offsets", "out", "first", "pitch", "count", "height", "width"}
"""What real shapes are multiples of 16 in."""

if __name__ == "__main__":
    for name, (kernel, pointers, flags) in KERNELS.items():
        names, types = kernel.arg_names, pointers | NUMBERS
        signature = {each: "constexpr" if each in flags else types[each] for each in names}
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(each),): value for each, value in flags.items()},
            attrs={(names.index(each),): [["tt.divisibility", 16]] for each in ALIGNED & set(names)},
        )
        options = {"enable_fp_fusion": False, "num_warps": 4 if name == "fp8" else WARPS}
        built = triton.compile(source, target=HOPPER, options=options)
        ptx = built.asm["ptx"]
        stores = re.findall(r"st\.global\S*", ptx)
        wide = sum(store.endswith("v4.b32") for store in stores)
        inexact = len(re.findall(r"\bfma\.|\.ftz", ptx))
        print(f"{name}\t{wide}\t{len(stores) - wide}\t{inexact}", flush=True)
