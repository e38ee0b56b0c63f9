"""Our experts inside a transformers model, against transformers' own, on one GPU.

    .venv/bin/python bench/hf_experts.py [--preset 5b] [--samples 4] [--steps 10] [--json F]
    .venv/bin/python bench/hf_experts.py --smoke              block and step alone, also without a GPU

A Qwen3-MoE of the preset's shape, bf16, built by transformers without a download. Each way runs in a process
of its own:

    block      one layer's experts forward and backward, the router's choices given: milliseconds, median
    step       a training step of the whole model: loss, backward, clip, torch's fused AdamW
    compiled   the same under torch.compile
    graphs     the same in its mode "reduce-overhead", which replays CUDA graphs: not a default

The checks are `grouped_mm` over ours: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _qwen3 import qwen3_config
from _smoke import (
    FEW_TOKENS,
    BenchParser,
    allocated,
    begin_peak,
    device,
    left_without_gpu,
    machine,
    synchronize,
    write,
)

from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load

WAYS, PARTS = ("grouped_mm", "moeclipse"), ("block", "step", "compiled", "graphs")
MODES = {"compiled": "default", "graphs": "reduce-overhead"}
"""Of torch.compile."""


def main() -> int:
    parser = BenchParser(__doc__, smoke={"preset": "tiny", "only": ["block", "step"], "steps": 1})
    parser.add_argument("--preset", default="5b")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=["block", "step", "compiled"])
    parser.add_argument("--samples", type=int, default=0, help="a step; 0: a microbatch of the preset")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--one", nargs=2, help="part and way, in this process")
    given = parser.parse_args()
    if left_without_gpu(__file__, given):
        return 2
    if given.one:
        part, way = given.one
        config = with_values(load(preset=given.preset), FEW_TOKENS if given.smoke else {})
        if given.samples:
            config = with_values(config, {"data.batch_size": given.samples, "optim.accumulate": 1})
        print("\n" + json.dumps(one(config, part, way, given.steps, warm=1 if given.smoke else 4)))
        return 0
    rows, checks = [], {}
    for part in given.only:
        found = {way: in_its_own_process(part, way, given) for way in WAYS}
        rows += [{"part": part, "way": way, **row} for way, row in found.items()]
        checks[part] = found["grouped_mm"]["ms"] / found["moeclipse"]["ms"]
        cells = "  ".join(f"{way} {row['ms']:.2f} ms {row['peak_gib']:.1f} GiB" for way, row in found.items())
        print(f"{part:<9} {cells}  {checks[part]:.2f}", flush=True)
    write(given.json, {"rows": rows, "checks": checks, "machine": machine()})
    return 0


def in_its_own_process(part: str, way: str, given: argparse.Namespace) -> dict[str, Any]:
    words = ["--one", part, way, "--preset", given.preset, "--steps", str(given.steps)]
    words += ["--smoke"] if given.smoke else ["--samples", str(given.samples)]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def one(config: TrainConfig, part: str, way: str, steps: int, warm: int) -> dict[str, Any]:
    """In this process."""
    layers = 1 if part == "block" else config.model.num_layers
    model = made(config, way, layers)
    run = block_of(model, config) if part == "block" else step_of(model, config, MODES.get(part))
    last = [run() for _ in range(warm)][-1]
    begin_peak()
    times = []
    for _ in range(steps):
        synchronize()
        before = time.perf_counter()
        last = run()
        synchronize()
        times.append(1e3 * (time.perf_counter() - before))
    peak = allocated(peak=True) / (1 << 30)
    return {"ms": statistics.median(times), "slowest_ms": max(times), "peak_gib": peak, "last": last}


def made(config: TrainConfig, way: str, layers: int) -> Any:
    from transformers import AutoModelForCausalLM

    import moeclipse.hf

    moeclipse.hf.register()
    theirs = qwen3_config(config, layers)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.set_experts_implementation(way)
    assert moeclipse.hf.num_experts_layers(model) == (layers if way == "moeclipse" else 0)
    return model.train()


def block_of(model: Any, config: TrainConfig) -> Callable[[], float]:
    """The MoE block of the first layer, router included."""
    block = model.model.layers[0].mlp
    tokens = config.data.batch_size // config.optim.accumulate * config.data.seq_len
    x = torch.randn(
        1, tokens, config.model.d_model, device=device(), dtype=torch.bfloat16, requires_grad=True
    )

    def run() -> float:
        block.zero_grad()
        x.grad = None
        out = block(x)
        y = out[0] if isinstance(out, tuple) else out
        y.backward(y.detach())
        return 0.0

    return run


def step_of(model: Any, config: TrainConfig, mode: str | None) -> Callable[[], float]:
    """`mode`: of torch.compile; None: eagerly."""
    call = model if mode is None else torch.compile(model, mode=mode)
    adam = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, betas=(0.9, 0.95), fused=True)
    samples = config.data.batch_size // config.optim.accumulate

    def run() -> float:
        ids = torch.randint(config.model.vocab_size, (samples, config.data.seq_len)).to(device())
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return float(loss.detach())

    return run


if __name__ == "__main__":
    raise SystemExit(main())
