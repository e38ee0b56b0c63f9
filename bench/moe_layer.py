"""How fast a MoE layer is on one GPU: router, grouping, SwiGLU experts and the weighted sum.

    .venv/bin/python bench/moe_layer.py [--configs a b ...] [--form pointer] [--json FILE]
    .venv/bin/python bench/moe_layer.py --form pointer --tiles qwen3
    .venv/bin/python bench/moe_layer.py --smoke

TFLOP/s count 6 T n d K for forward and 12 T n d K for backward. `saved` is what forward leaves for backward
beside the input itself, `peak` the most that was allocated above inputs and weights. Implementations: the
kernels with bf16 gradients (what autograd hands out), the kernels adding into fp32 main_grad, plain torch
(sort, index, F.grouped_mm), and SonicMoE or ScatterMoE where they can be imported. Times are medians; the
implementations take turns.

`--form pointer` measures beside them the same kernels without the copy engine, as GPUs without it run them.
`--tiles` measures each kernel of a configuration by itself, with every tile that passes the model of shared
memory and registers, and prints the table's tile and the best ones.

`--smoke` runs a layer of few tokens, without a GPU through the kernels' references.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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

from moeclipse.ops import expert_mlp, tuning
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference
from moeclipse.ops.grouped_gemm import grouped_wgrad_kernel
from moeclipse.ops.grouping import group_rows
from moeclipse.ops.topk_softmax import topk_softmax
from moeclipse.ops.tuning import Tile

CONFIGS = {
    "a": (24576, 1536, 256, 128, 8),
    "b": (32768, 4096, 512, 128, 8),
    "c": (32768, 4096, 1024, 128, 8),
    "olmoe": (32768, 2048, 1024, 64, 8),
    "qwen3": (32768, 2048, 768, 128, 8),
    "mixtral": (8192, 4096, 14336, 8, 2),
    "smoke": (256, 128, 128, 8, 2),
}
BARS = {"a": 426, "b": 530, "c": 556, "olmoe": 575, "qwen3": 548, "mixtral": 580}
Layer = Callable[[torch.Tensor], torch.Tensor]


class Weights:
    """Router and experts of one configuration, with fp32 sums beside the experts."""

    def __init__(self, d: int, n: int, num_experts: int, top_k: int) -> None:
        def normal(*shape: int) -> torch.Tensor:
            weight = torch.empty(shape, device=device(), dtype=torch.bfloat16).normal_(0, shape[-1] ** -0.5)
            return weight.requires_grad_()

        self.router = normal(num_experts, d)
        self.up, self.down = normal(num_experts, 2 * n, d), normal(num_experts, d, n)
        self.top_k = top_k
        self.parameters = (self.router, self.up, self.down)

    def route(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The router in plain torch."""
        logits_TK, ids_TK = F.linear(x_TD, self.router).topk(self.top_k, dim=1)
        return logits_TK.float().softmax(1), ids_TK


def ours(weights: Weights, into: tuple[torch.Tensor, torch.Tensor] | None = None) -> Layer:
    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        scores_TK, ids_TK = topk_softmax(F.linear(x_TD, weights.router), weights.top_k)
        if not x_TD.is_cuda:
            return grouped_experts_reference(x_TD, scores_TK, ids_TK, weights.up, weights.down)
        return grouped_experts(x_TD, scores_TK, ids_TK, weights.up, weights.down, into=into)

    return layer


def plain_torch(weights: Weights) -> Layer:
    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        scores_TK, ids_TK = weights.route(x_TD)
        num_experts = len(weights.up)
        order = ids_TK.flatten().argsort(stable=True)
        ends = torch.bincount(ids_TK.flatten(), minlength=num_experts).cumsum(0).to(torch.int32)
        token = order // weights.top_k
        gate, up = F.grouped_mm(x_TD[token], weights.up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        y = F.grouped_mm(F.silu(gate) * up, weights.down.transpose(1, 2), offs=ends)
        y = y * scores_TK.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x_TD).index_add(0, token, y)

    return layer


def sonic(config: tuple[int, ...]) -> Layer:
    from sonicmoe import MoE
    from sonicmoe.enums import ActivationType

    _, d, n, num_experts, top_k = config
    moe = MoE(num_experts, top_k, d, n, ActivationType.SWIGLU, add_bias=False, std=0.02)
    moe = moe.to(device="cuda", dtype=torch.bfloat16)
    return lambda x_TD: moe(x_TD)[0]


def scatter(weights: Weights, config: tuple[int, ...]) -> Layer:
    from scattermoe.mlp import GLUMLP

    _, d, n, num_experts, top_k = config
    mlp = GLUMLP(d, n, num_experts, top_k, activation=torch.nn.SiLU()).to("cuda", torch.bfloat16)

    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        scores_TK, ids_TK = weights.route(x_TD)
        return mlp(x_TD, scores_TK.to(x_TD.dtype), ids_TK)

    return layer


POINTERS = ", pointers"


@contextlib.contextmanager
def in_form(key: str) -> Iterator[None]:
    """Kernels of implementations that say so take the device for one without the copy engine."""
    asked = tuning.architecture_of
    if POINTERS in key and (found := asked(torch.device(device(), 0))) is not None:
        tuning.architecture_of = lambda _: replace(found, form="pointer")
    try:
        yield
    finally:
        tuning.architecture_of = asked


def implementations(weights: Weights, config: tuple[int, ...], form: str | None) -> dict[str, Layer]:
    into = (torch.zeros_like(weights.up, dtype=torch.float32),)
    into += (torch.zeros_like(weights.down, dtype=torch.float32),)
    layers = {"moeclipse": ours(weights)}
    if weights.up.is_cuda:
        layers["moeclipse, fp32 main_grad"] = ours(weights, into)
    if form == "pointer":
        layers |= {key + POINTERS: layer for key, layer in layers.items()}
    layers["plain torch"] = plain_torch(weights)
    for name, make in {
        "SonicMoE": lambda: sonic(config),
        "ScatterMoE": lambda: scatter(weights, config),
    }.items():
        try:
            layers[name] = make()
        except ImportError as missing:
            print(f"  {name}: not measured ({missing})", flush=True)
    return layers


def timed(run: Callable[[], Any], calls: int = 4) -> float:
    """Milliseconds of one call; several in a row, because a stopped device hides what launching costs."""
    run()
    clock = Clock()
    for _ in range(calls):
        run()
    return clock.stop() / calls


def memory(layer: Layer, x: torch.Tensor, d_out: torch.Tensor, weights: Weights) -> tuple[float, float]:
    """GiB (saved, peak). Gradients are counted in the peak."""
    clear(x, weights)
    synchronize()
    before = allocated()
    begin_peak()
    out = layer(x)
    saved = allocated() - before - out.numel() * out.element_size()
    out.backward(d_out)
    peak = allocated(peak=True) - before
    clear(x, weights)
    return saved / 2**30, peak / 2**30


def step(layer: Layer, x: torch.Tensor, d_out: torch.Tensor, weights: Weights) -> None:
    layer(x).backward(d_out)
    clear(x, weights)


def clear(x: torch.Tensor, weights: Weights) -> None:
    for tensor in (x, *weights.parameters):
        tensor.grad = None


def measure(name: str, config: tuple[int, ...], repeats: int, form: str | None) -> list[dict[str, Any]]:
    num_tokens, d, n, num_experts, top_k = config
    weights = Weights(d, n, num_experts, top_k)
    x = torch.randn(num_tokens, d, device=device()).bfloat16().requires_grad_()
    d_out = torch.randn(num_tokens, d, device=device()).bfloat16()
    layers = implementations(weights, config, form)
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in layers}
    first: dict[str, float] = {}
    for turn in range(repeats + 2):
        for key, layer in layers.items():
            start = time.perf_counter()
            with in_form(key):
                with torch.no_grad():
                    forward = timed(lambda layer=layer: layer(x))
                both = timed(lambda layer=layer: step(layer, x, d_out, weights))
            first.setdefault(key, time.perf_counter() - start)
            if turn >= 2:
                times[key].append((forward, both))
    rows = []
    flops = 6 * num_tokens * n * d * top_k / 1e9
    for key, pairs in times.items():
        forward = statistics.median(pair[0] for pair in pairs)
        both = statistics.median(pair[1] for pair in pairs)
        with in_form(key):
            saved, peak = memory(layers[key], x, d_out, weights)
        row = {"config": name, "implementation": key, "forward_ms": forward, "both_ms": both}
        row |= {"forward_tflops": flops / forward, "backward_tflops": 2 * flops / (both - forward)}
        row |= {"both_tflops": 3 * flops / both, "saved_gib": saved, "peak_gib": peak, "first_s": first[key]}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['config']:8} {row['implementation']:35} {row['both_ms']:8.3f} ms"
            f"  forward {row['forward_tflops']:4.0f}  backward {row['backward_tflops']:4.0f}"
            f"  both {row['both_tflops']:4.0f} TFLOP/s"
            f"  saved {row['saved_gib']:5.2f}  peak {row['peak_gib']:5.2f} GiB"
            f"  first call {row['first_s']:.1f} s",
            flush=True,
        )


def beside(rows: list[dict[str, Any]]) -> None:
    """Pointers beside descriptors and plain torch: what either form reaches of the other."""
    speed = {(row["config"], row["implementation"]): row["both_tflops"] for row in rows}
    for (name, key), pointers in speed.items():
        if key.endswith(POINTERS):
            described, plain = speed[name, key.removesuffix(POINTERS)], speed[name, "plain torch"]
            shares = f"{pointers / described:.2f} of descriptors, {pointers / plain:.2f} of plain torch"
            print(f"{name:8} {key:35} {shares}")


def kernels(config: tuple[int, ...]) -> dict[str, tuple[tuple[int, int], Callable[[Tile], object]]]:
    """Every kernel of a layer by its line: the widths of its weight, and a call with a tile."""
    num_tokens, d, n, num_experts, top_k = config
    weights = Weights(d, n, num_experts, top_k)
    up, down = weights.up.detach(), weights.down.detach()
    x, d_out = (torch.randn(num_tokens, d, device=device()).bfloat16() for _ in range(2))
    scores_TK, ids_TK = weights.route(x)
    grouping = group_rows(ids_TK, num_experts)
    index, scores = grouping.row_token_M, scores_TK.detach().flatten()
    h, a = expert_mlp.up(x, up, grouping, index)
    into = {
        name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in (("up", up), ("down", down))
    }

    def wgrad(dy: torch.Tensor, rows: torch.Tensor, name: str, **index: Any) -> Callable[[Tile], object]:
        return lambda tile: grouped_wgrad_kernel(
            dy, rows, grouping.offsets_E1, into[name], tile=tile, **index
        )

    return {
        "up": ((d, n), lambda tile: expert_mlp.up_kernel(x, up, grouping, index, tile)),
        "down": ((d, n), lambda tile: expert_mlp.down_kernel(a, down, grouping, tile)),
        "d_hidden": (
            (d, n),
            lambda tile: expert_mlp.d_hidden_kernel(d_out, scores, h, down, grouping, index, tile),
        ),
        "d_rows": ((2 * n, d), lambda tile: expert_mlp.d_rows_kernel(h, up, grouping, tile)),
        "wgrad_x, add": ((2 * n, d), wgrad(h, x, "up", x_index_M=index)),
        "wgrad_dy, add": ((d, n), wgrad(d_out, a, "down", dy_index_M=index)),
    }


def fastest_tiles(name: str, form: str | None, most: int = 4) -> None:
    """Of each kernel the table's tile and the fastest ones, in milliseconds."""
    from triton.testing import do_bench

    with in_form(POINTERS if form == "pointer" else ""):
        found = tuning.architecture_of(torch.device("cuda", 0))
        assert found is not None, "the kernels do not run on this device"
        for line, (widths, run) in kernels(CONFIGS[name]).items():
            times: list[tuple[float, Tile]] = []
            usual = tuning.tile_for(line, torch.device("cuda", 0), *widths)
            others = [tile for tile in tuning.candidates(line, found) if tile.k == 64 and tile.stages > 2]
            for tile in dict.fromkeys([usual, *others]):
                try:
                    times.append((do_bench(functools.partial(run, tile), warmup=5, rep=20), tile))
                except Exception as error:
                    print(f"{line:14} {tile}: {type(error).__name__}", flush=True)
            for ms, tile in [times[0], *sorted(times, key=lambda pair: pair[0])[:most]]:
                said = f"n={tile.n} k={tile.k} warps={tile.warps} stages={tile.stages} per_sm={tile.per_sm}"
                print(
                    f"{name:8} {line:14} {ms:7.3f} ms  {said} split={tile.split} group={tile.group}",
                    flush=True,
                )


def main() -> int:
    parser = BenchParser(__doc__, smoke={"configs": ["smoke"], "repeats": 1})
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(BARS))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--form", choices=["pointer"], help="measure this form of the kernels, too")
    parser.add_argument("--tiles", choices=CONFIGS, help="the fastest tiles of each kernel, nothing else")
    args = parser.parse_args()
    if left_without_gpu(__file__, args):
        return 2
    torch.manual_seed(0)
    if args.tiles:
        fastest_tiles(args.tiles, args.form)
        return 0
    rows: list[dict[str, Any]] = []
    for name in args.configs:
        new = measure(name, CONFIGS[name], args.repeats, args.form)
        show(new)
        rows += new
        if torch.cuda.device_count():
            torch.cuda.empty_cache()
    checks = {row["config"]: row["both_tflops"] for row in rows if row["implementation"] == "moeclipse"}
    for name, bar in ((name, BARS[name]) for name in checks if name in BARS):
        print(f"{name:8} {checks[name]:4.0f} TFLOP/s, {checks[name] / bar:.2f} of the bar of {bar}")
    beside(rows)
    write(args.json, {"rows": rows, "checks": checks, "machine": machine()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
