"""The weight gradient whose warps divide the work, compiled for Hopper.

Neither a GPU nor an interpreter runs it here. What it computes is shown on a device (`test_on_gpu.py`); this
shows that it compiles with the installed Triton, fits a multiprocessor and keeps the order of its barriers.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from moeclipse.ops.architecture import ARCHITECTURES
from moeclipse.ops.tuning import HOPPER, Tile

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


def compiled(tile: Tile, out: str, *, add: bool, gather: str = "none") -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from moeclipse.ops.triton.wgrad_gluon import grouped_wgrad

    def block(dtype: str, shape: list[int]) -> str:
        bits = 32 if dtype == "fp32" else 16
        layout = NVMMASharedLayout(min(128, shape[-1] * bits // 8), bits, rank=len(shape))
        return f"tensordesc<{dtype}{shape},{layout!r}>"

    constants = {
        "GATHER": gather, "ADD": add, "GROUP": tile.group, "STAGGER": tile.stagger, "PROGRAMS": 132,
        "BM": tile.m, "BN": tile.n, "BK": tile.k, "STAGES": tile.stages, "BUFFERS": tile.staging,
    }  # fmt: skip
    if gather == "none":
        constants["index"] = None
    signature = {
        "dy": "*bf16" if gather == "dy" else block("bf16", [1, 1, tile.k, tile.m // 2]),
        "x": "*bf16" if gather == "x" else block("bf16", [1, 1, tile.k, tile.n]),
        "index": "*i32", "stride": "i32",
        "out": block(out, [1, 64, tile.n // tile.split]),
        "offsets": "*i32", "num_experts": "i32", "N": "i32", "D": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    names = list(signature)
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = GluonASTSource(grouped_wgrad, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize(
    ("line", "out", "add"),
    [("wgrad_roles, add", "fp32", True), ("wgrad_roles, add", "fp32", False), ("wgrad_roles", "bf16", False)],
)
def test_compiles_for_hopper(line: str, out: str, add: bool) -> None:
    kernel = compiled(HOPPER[line], out, add=add)
    text = kernel.asm["ptx"]
    assert kernel.metadata.shared <= ARCHITECTURES["sm_90"].shared
    assert kernel.metadata.num_warps == 12, "two groups of four that multiply, and one whose first warp loads"
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in text
    assert ("cp.reduce.async.bulk" in text) is add
    # All must have read a slot before one of them gives it back.
    assert re.search(
        r"wgmma\.wait_group\.sync\.aligned 1;(?:(?!mbarrier\.arrive).)*?bar\.sync", text, re.DOTALL
    )
    assert ".local" not in text, "sums have left the registers"


@pytest.mark.parametrize("gather", ["dy", "x"])
@pytest.mark.parametrize(("out", "add"), [("fp32", True), ("fp32", False), ("bf16", False)])
def test_gathered_rows_compile_for_hopper(gather: str, out: str, add: bool) -> None:
    tile = HOPPER[f"wgrad_roles_{gather}, add" if out == "fp32" else f"wgrad_roles_{gather}"]
    kernel = compiled(tile, out, add=add, gather=gather)
    text = kernel.asm["ptx"]
    assert kernel.metadata.shared <= ARCHITECTURES["sm_90"].shared
    assert kernel.metadata.num_warps == 12, "two groups of four that multiply, and four warps that load"
    width = tile.m if gather == "dy" else tile.n
    copies = re.findall(r"cp\.async\.(c[ag])\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", text)
    assert copies == [("cg", "0x10")] * (tile.k * width * 2 // (128 * 16)), "16 bytes a thread"
    assert "cp.async.mbarrier.arrive.noinc" in text
    # Threads wrote what the tensor cores read: both groups need a fence between waiting and multiplying.
    between = r"try_wait\.parity(?:(?!wgmma).)*?fence\.proxy\.async(?:(?!try_wait|bar\.sync).)*?wgmma\.fence"
    assert len(re.findall(between, text, re.DOTALL)) == 2
    assert ".local" not in text, "sums have left the registers"


def test_buffers_that_break_the_turn_are_refused() -> None:
    with pytest.raises(Exception, match="staging buffers must divide"):
        compiled(Tile(k=32, stages=6, split=8, staging=3), "fp32", add=True)
