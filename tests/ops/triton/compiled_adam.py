"""Compiles the optimizer's kernel for GPUs that need not be there; run by `test_compiles.py`.

Prints one line for each form of the state and each architecture: bytes of PTX.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeclipse.ops.adam import BLOCK
from moeclipse.ops.triton.adam import adam

NUMBERS = dict.fromkeys(("new_m", "old_v", "new_v", "eps", "kept", "rate", "filled"), "fp32")
PLAIN = {
    "weight": "*fp32",
    "adam_m": "*fp32",
    "adam_v": "*fp32",
    "grad": "*fp32",
    "rounded": "*bf16",
    "factor": "*fp32",
    "step_key": "i64",
    "numel": "i32",
    **NUMBERS,
}
CHANCE = {"table": "*i64", "of_blocks": "*i32"}
EIGHT = {"adam_m": "*u8", "m_tops": "*u8", "adam_v": "*u8", "v_tops": "*u8", **CHANCE}
NARROW = {"weight": "*bf16", "adam_m": "*bf16", "adam_v": "*bf16", "grad": "*bf16", **CHANCE}
FORMS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "fp32": (PLAIN, {"ROUND": 1}),
    "low bits": (PLAIN | {"weight": "*i16", "ties": "*u8"}, {"ROUND": 1, "LOW_BITS": 1}),
    "8 bits": (PLAIN | EIGHT, {"ROUND": 1, "GROUP": 256}),
    "8 bits, low bits": (
        PLAIN | EIGHT | {"weight": "*i16", "ties": "*u8"},
        {"ROUND": 1, "LOW_BITS": 1, "GROUP": 16},
    ),
    "no master": ({k: v for k, v in (PLAIN | NARROW).items() if k != "rounded"}, {"BY_CHANCE": 1}),
}

if __name__ == "__main__":
    names = adam.arg_names
    for form, (types, flags) in FORMS.items():
        given = {"ROUND": 0, "LOW_BITS": 0, "BY_CHANCE": 0, "GROUP": 0, "BLOCK": BLOCK, **flags}
        fixed = {name: given.get(name) for name in names if name not in types}
        signature = {name: types.get(name, "constexpr") for name in names}
        constants = {(names.index(name),): value for name, value in fixed.items()}
        for architecture in (80, 90):
            source = ASTSource(fn=adam, signature=signature, constexprs=constants)
            target = GPUTarget("cuda", architecture, 32)
            built = triton.compile(source, target=target, options={"num_warps": 8})
            print(f"{form}\t{architecture}\t{len(built.asm['ptx'])}", flush=True)
