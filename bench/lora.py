"""Fine-tuning with low-rank adapters on one GPU: ours beside transformers with peft.

    .venv/bin/python bench/lora.py [--layers 12] [--batch 8] [--length 1024] [--rank 16] [--ways ...]
    .venv/bin/python bench/lora.py --smoke                    tiny, also without a GPU
    .venv/bin/python bench/lora.py --model gpt-oss-120b --layers 36 --ways "ours experts" \
        --set 'model.base="mxfp4"'

The shape of Qwen3-30B-A3B with some of its layers and random weights (or that of another model that
`moeclipse plan` knows), the same number of tokens in a step, each way in a process of its own:

    ours qv         adapters on q and v, `Learner.step` as `moeclipse train` runs it
    ours experts    on q, v and the experts
    peft qv         transformers' model with `target_modules`, experts by grouped_mm, fused AdamW
    peft experts    the same with `target_parameters` on both matrices of the experts

`--set 'pipeline.recompute="full"'` runs whole layers again in both (theirs: gradient checkpointing).
A step ends when its loss is on the host. `busy`, kernels and launches are of one profiled step more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _qwen3 import qwen3_config, their_loop
from _smoke import BenchParser, device, left_without_gpu, machine, write
from whole_step import our_step, summed, timed

from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.plan_config import config_for

WAYS = ("ours qv", "ours experts", "peft qv", "peft experts")
ALPHA = 32.0


def main() -> int:
    smallest = {"model": "tiny", "layers": 2, "batch": 2, "length": 32, "steps": 1, "rank": 4}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--model", default="qwen3-moe-8l", help="a preset, or a name that `plan` knows")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="timed in each process")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of our configuration")
    parser.add_argument("--one", help="way, in this process")
    given = parser.parse_args()
    if left_without_gpu(__file__, given):
        return 2
    if given.one:
        print("\n" + json.dumps(one(given.one, given)))
        return 0
    rows = [summed(way, given.microbatches, [done]) for way in given.ways if (done := apart(way, given))]
    show(rows)
    times = {row["way"]: row["step_ms"] for row in rows}
    checks = {
        f"over_peft_{what}": times[f"peft {what}"] / times[f"ours {what}"]
        for what in ("qv", "experts")
        if f"peft {what}" in times and f"ours {what}" in times
    }
    print("  ".join(f"{name} {value:.2f}" for name, value in checks.items()))
    write(given.json, {"rows": rows, "checks": checks, "machine": machine()})
    return int(len(rows) < len(given.ways))


def apart(way: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """In a process of its own; None: it failed, out of memory perhaps."""
    words = ["--one", way, *(["--smoke"] if given.smoke else [])]
    for name in ("model", "layers", "batch", "length", "microbatches", "rank", "steps"):
        words += [f"--{name}", str(getattr(given, name))]
    words += ["--set", *given.set] if given.set else []
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{way}: failed", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def one(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """In this process."""
    asked = dict(item.split("=", 1) for item in given.set)
    config = with_values(
        config_for(given.model),
        {
            "model.num_layers": given.layers,
            "data.batch_size": given.batch,
            "data.seq_len": given.length,
            "optim.accumulate": given.microbatches,
            "lora.rank": given.rank,
            "lora.alpha": ALPHA,
            "lora.targets": ["q", "v", *(["experts"] if way.endswith("experts") else [])],
            **{key: json.loads(value) for key, value in asked.items()},
        },
    )
    begun = time.monotonic()
    step = our_step(config) if way.startswith("ours") else peft_step(config)
    return timed(step, given, given.batch * given.length, begun)


def peft_step(config: TrainConfig) -> Callable[[], float]:
    """The loop that one writes with transformers and peft: adapters in fp32 as peft makes them."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeForCausalLM

    theirs = qwen3_config(config, config.model.num_layers)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device()):
        base = Qwen3MoeForCausalLM._from_config(
            theirs, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=torch.bfloat16
        )
    torch.set_default_dtype(torch.float32)
    if config.pipeline.recompute == "full":
        base.gradient_checkpointing_enable({"use_reentrant": False})
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if config.lora.has("experts") else None
    how = LoraConfig(
        r=config.lora.rank,
        lora_alpha=int(config.lora.alpha),
        target_modules=["q_proj", "v_proj"],
        target_parameters=experts,
    )
    model = get_peft_model(base, how)
    return their_loop(config, model, model)


def show(rows: list[dict[str, Any]]) -> None:
    names = ("step_ms", "tokens_per_s", "peak_gib", "busy", "busy_ms", "kernels", "launches", "start_s")
    print(f"\n{'way':<14} " + " ".join(f"{name:>12}" for name in names))
    for row in rows:
        print(f"{row['way']:<14} " + " ".join(f"{row[name]:12.2f}" for name in names), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
