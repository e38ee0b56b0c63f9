"""Weight gradients added into fp32: dense and grouped, beside products that add nothing.

    .venv/bin/python bench/wgrad.py [--json FILE]
    .venv/bin/python bench/wgrad.py --smoke

Dense: `torch.addmm` into fp32 (fused) against a bf16 product then an addition, and against the bare bf16
product. Grouped: one kernel over all experts with ragged random groups, adding into fp32, against
`F.grouped_mm`, which writes bf16 and adds nothing, and against `F.grouped_mm` then an addition. `peak` is
what a call allocates.

`--smoke` runs small products, without a GPU through the kernels' references.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
import torch.nn.functional as F
from _smoke import (
    BenchParser,
    Clock,
    allocated,
    begin_peak,
    device,
    left_without_gpu,
    machine,
    synchronize,
    write,
)

from moeclipse.ops.grouped_gemm import dense_wgrad, grouped_wgrad

DENSE = [(8192, 4096, 4096), (16384, 7168, 2048), (4096, 1024, 1024), (32768, 4096, 4096)]
GROUPED = {  # rows, width of dy, width of x, experts: the up-projections of bench/moe_layer.py
    "a": (196608, 512, 1536, 128),
    "b": (262144, 1024, 4096, 128),
    "c": (262144, 2048, 4096, 128),
    "olmoe": (262144, 2048, 2048, 64),
    "qwen3": (262144, 1536, 2048, 128),
    "mixtral": (16384, 28672, 4096, 8),
}
SMALL_DENSE, SMALL_GROUPED = [(256, 128, 128)], {"smoke": (512, 128, 128, 4)}


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device()).bfloat16()


def compare(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """(milliseconds, MiB allocated) of each; enough calls in a row that each runs at its own clock.

    The device slows down under load and recovers in between, so what ran before matters: the order is
    shuffled in every turn.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks = {}
    order = list(runs)
    for turn in range(repeats + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            run = runs[name]
            calls = 5 if turn == 0 else max(5, int(20 / times[name][0]))
            run()
            synchronize()
            before = allocated()
            begin_peak()
            clock = Clock()
            for _ in range(calls):
                run()
            times[name].append(clock.stop() / calls)
            peaks[name] = (allocated(peak=True) - before) / 2**20
    return {name: (statistics.median(ms[1:]), peaks[name]) for name, ms in times.items()}


def dense(tokens: int, out: int, width: int, repeats: int) -> list[dict[str, Any]]:
    dy, x = bf16(tokens, out), bf16(tokens, width)
    into = torch.zeros(out, width, device=device())
    runs = {
        "fused": lambda: dense_wgrad(dy, x, into),
        "product, then addition": lambda: into.add_(dy.t() @ x),
        "bare product": lambda: dy.t() @ x,
    }
    return rows_of(f"{tokens} {out} {width}", 2 * tokens * out * width, compare(runs, repeats))


def grouped(name: str, rows: int, out: int, width: int, experts: int, repeats: int) -> list[dict[str, Any]]:
    counts = torch.bincount(torch.randint(experts, (rows,), device=device()), minlength=experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    ends = offsets[1:].contiguous()
    dy, x = bf16(rows, out), bf16(rows, width)
    into = torch.zeros(experts, out, width, device=device())
    source = bf16(rows // 8, width)
    index = torch.randint(rows // 8, (rows,), device=device(), dtype=torch.int32)
    runs = {
        "fused": lambda: grouped_wgrad(dy, x, offsets, into),
        "fused, x gathered": lambda: grouped_wgrad(dy, source, offsets, into, x_index_M=index),
        "product, then addition": lambda: into.add_(F.grouped_mm(dy.t(), x, offs=ends)),
        "bare product": lambda: F.grouped_mm(dy.t(), x, offs=ends),
    }
    return rows_of(name, 2 * rows * out * width, compare(runs, repeats))


def rows_of(name: str, flops: int, results: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    rows = []
    for kind, (ms, peak) in results.items():
        rows.append({"shape": name, "kind": kind, "ms": ms, "tflops": flops / ms / 1e9, "peak_mib": peak})
        print(
            f"{name:18} {kind:24} {ms:8.3f} ms {rows[-1]['tflops']:5.0f} TFLOP/s  peak {peak:7.1f} MiB",
            flush=True,
        )
    return rows


def worst(rows: list[dict[str, Any]], above: str, below: str) -> float:
    """The smallest ratio over all shapes."""
    speed = {(row["shape"], row["kind"]): row["tflops"] for row in rows}
    return min(speed[shape, above] / speed[shape, below] for shape, kind in speed if kind == above)


def main() -> int:
    parser = BenchParser(__doc__, smoke={"repeats": 1})
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if left_without_gpu(__file__, args):
        return 2
    torch.manual_seed(0)
    shapes, groups = (SMALL_DENSE, SMALL_GROUPED) if args.smoke else (DENSE, GROUPED)
    dense_rows = [row for shape in shapes for row in dense(*shape, args.repeats)]
    grouped_rows: list[dict[str, Any]] = []
    for name, shape in groups.items():
        grouped_rows += grouped(name, *shape, args.repeats)
        if torch.cuda.device_count():
            torch.cuda.empty_cache()
    checks = {
        "dense_over_plain": worst(dense_rows, "fused", "bare product"),
        "dense_over_add": worst(dense_rows, "fused", "product, then addition"),
        "grouped_over_grouped_mm": worst(grouped_rows, "fused", "bare product"),
        "grouped_over_add": worst(grouped_rows, "fused", "product, then addition"),
        "grouped_peak_mib": max(row["peak_mib"] for row in grouped_rows if row["kind"].startswith("fused")),
    }
    print("  ".join(f"{name} {value:.3f}" for name, value in checks.items()))
    write(args.json, {"rows": dense_rows + grouped_rows, "checks": checks, "machine": machine()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
