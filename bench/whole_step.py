"""A whole training step, ours and that of plain transformers, on one GPU.

    .venv/bin/python bench/whole_step.py [--preset 5b] [--microbatches 1 4] [--only ours compiled] [--json F]
    .venv/bin/python bench/whole_step.py --smoke              ours and eager, also without a GPU

One model, one GPU, the same number of tokens in a step, each way of training it in a process of its own, in
turns (`--rounds`); the table shows medians over all steps that were timed:

    ours        `Learner.step`, as `moeclipse train` runs it: fp32 main_grad, master weights and Adam
    ours bf16   the same with optim.state bf16, optim.master none and optim.main_grad bf16
    eager       transformers' Qwen3-MoE of this shape, bf16, experts by grouped_mm, torch's fused AdamW
    compiled    the same under torch.compile

A step ends when the numbers of its record are on the host: loss and gradient norm. `busy` is the share of a
step in which a kernel runs, from a profile of one step more; kernels and launches are of that step: nodes of
a replayed graph are kernels, and its replay is one launch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _qwen3 import qwen3_config, their_loop
from _smoke import FEW_TOKENS, BenchParser, begin_peak, device, left_without_gpu, machine, synchronize, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

WAYS = ("ours", "ours bf16", "eager", "compiled")
BF16_STATES = {"optim.state": "bf16", "optim.master": "none", "optim.main_grad": "bf16", "optim.beta2": 0.95}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
GIB = 1 << 30


def main() -> int:
    smallest = {"preset": "tiny", "microbatches": [1], "only": ["ours", "eager"], "steps": 1}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--preset", default="5b")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=10, help="timed in each process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each way, in turns")
    parser.add_argument("--trace", type=Path, help="folder for a profile of a step of each")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of our configuration")
    parser.add_argument("--one", help="way, in this process")
    given = parser.parse_args()
    if left_without_gpu(__file__, given):
        return 2
    if given.one:
        print("\n" + json.dumps(one(given.one, given)))
        return 0
    rows = []
    for microbatches in given.microbatches:
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in given.only}
        for _ in range(given.rounds):
            for way in given.only:
                found[way] += in_its_own_process(way, microbatches, given)
        rows += [summed(way, microbatches, results) for way, results in found.items() if results]
        show([row for row in rows if row["microbatches"] == microbatches])
    checks = checks_of(rows)
    print("  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    write(given.json, {"rows": rows, "checks": checks, "machine": machine()})
    return int(len(rows) < len(given.only) * len(given.microbatches))


def in_its_own_process(way: str, microbatches: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    words = ["--one", way, "--microbatches", str(microbatches), "--preset", given.preset]
    words += ["--steps", str(given.steps), *(["--set", *given.set] if given.set else [])]
    words += ["--trace", str(given.trace)] if given.trace else []
    words += ["--smoke"] if given.smoke else []
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{way}, {microbatches} microbatches: failed", file=sys.stderr)
        return []
    return [json.loads(done.stdout.strip().splitlines()[-1])]


def one(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """In this process."""
    (microbatches,) = given.microbatches
    few = FEW_TOKENS if given.smoke else {}
    config = with_values(load(preset=given.preset), {**few, "optim.accumulate": microbatches})
    begun = time.monotonic()
    if way.startswith("ours"):
        asked = dict(item.split("=", 1) for item in given.set)
        values = {key: json.loads(value) for key, value in asked.items()}
        step = our_step(with_values(config, values | (BF16_STATES if way == "ours bf16" else {})))
    else:
        step = their_step(config, compiled=way == "compiled")
    file = given.trace / f"{way.replace(' ', '-')}-{microbatches}.json" if given.trace else None
    return timed(step, given, config.data.batch_size * config.data.seq_len, begun, file)


def timed(
    step: Callable[[], float], given: argparse.Namespace, tokens: int, begun: float, file: Path | None = None
) -> dict[str, Any]:
    """Of steps that are warm; `begun`: when the first was prepared. One more is profiled, into `file`."""
    losses = [step() for _ in range(1 if given.smoke else 4)]
    start_s = time.monotonic() - begun
    if torch.cuda.device_count():
        torch.cuda.empty_cache()
    begin_peak()
    times = []
    for _ in range(given.steps):
        synchronize()
        before = time.perf_counter()
        losses.append(step())
        synchronize()
        times.append(1e3 * (time.perf_counter() - before))
    # Not what is allocated: memory of a replayed graph counts as free.
    peak = torch.cuda.max_memory_reserved() / GIB if torch.cuda.device_count() else 0.0
    rest = {"peak_gib": peak, "start_s": start_s, "tokens": tokens, "losses": losses}
    return {"times": times, **rest, **profiled(step, file)}


def our_step(config: TrainConfig) -> Callable[[], float]:
    learner = Learner(config, Mesh.single(device()))
    steps = iter(range(1 << 30))
    return lambda: float(learner.step(next(steps))["loss"])


def their_step(config: TrainConfig, *, compiled: bool) -> Callable[[], float]:
    from transformers import Qwen3MoeForCausalLM

    theirs = qwen3_config(config, config.model.num_layers)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device()):
        model = Qwen3MoeForCausalLM._from_config(
            theirs, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=torch.bfloat16
        )
    torch.set_default_dtype(torch.float32)
    assert model.config._experts_implementation == "grouped_mm"
    return their_loop(config, model, torch.compile(model) if compiled else model)


def profiled(step: Callable[[], float], file: Path | None) -> dict[str, Any]:
    """Kernels and launches of one step, and how much of it the device was busy."""
    from torch.profiler import ProfilerActivity, profile

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both if torch.cuda.device_count() else both[:1]) as found:
        begun = time.perf_counter()
        step()
        synchronize()
        wall = time.perf_counter() - begun
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(file))
    events = found.events()
    kernels = [
        e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]
    spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    span = (until - spans[0][0]) if spans else 1.0
    launches = sum(e.name.startswith(LAUNCHES) for e in events)
    by_name: dict[str, float] = {}
    for e in kernels:
        by_name[e.name[:90]] = by_name.get(e.name[:90], 0.0) + (e.time_range.end - e.time_range.start) / 1e3
    top = sorted(by_name.items(), key=lambda item: -item[1])[:25]
    often = Counter(e.name[:90] for e in kernels).most_common(40)
    result = {"busy_ms": busy / 1e3, "kernels": len(kernels), "launches": launches, "profiled_ms": 1e3 * wall}
    return result | {"span_ms": span / 1e3, "top": top, "often": often}


def summed(way: str, microbatches: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    times = [ms for result in results for ms in result["times"]]
    step_ms = statistics.median(times)
    row = {"way": way, "microbatches": microbatches, "step_ms": step_ms, "slowest_ms": max(times)}
    row |= {"tokens_per_s": 1e3 * results[0]["tokens"] / step_ms}
    row |= {"busy": min(results[0]["busy_ms"] / step_ms, 1.0)}
    return row | {name: results[0][name] for name in results[0] if name not in ("times", "tokens")}


def show(rows: list[dict[str, Any]]) -> None:
    names = ("step_ms", "tokens_per_s", "peak_gib", "busy", "busy_ms", "kernels", "launches", "start_s")
    print(f"\n{'way':<10} {'M':>2} " + " ".join(f"{name:>12}" for name in names))
    for row in rows:
        cells = " ".join(f"{row[name]:12.2f}" for name in names)
        print(f"{row['way']:<10} {row['microbatches']:>2} {cells}", flush=True)


def checks_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Theirs over ours: above 1 we are faster."""
    times = {(row["way"], row["microbatches"]): row["step_ms"] for row in rows}
    checks = {}
    for (way, microbatches), ms in times.items():
        theirs = times.get(("compiled", microbatches))
        if way.startswith("ours") and theirs:
            suffix = "_bf16" if way.endswith("bf16") else ""
            checks[f"over_compiled_{microbatches}{suffix}"] = theirs / ms
    return checks


if __name__ == "__main__":
    raise SystemExit(main())
