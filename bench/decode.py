"""Text from a model on one GPU: ours beside transformers, one text and eight at once.

    .venv/bin/python bench/decode.py [--layers 12] [--tokens 128] [--prompt 32] [--ways ...]
    .venv/bin/python bench/decode.py --smoke                  tiny, also without a GPU

The shape of Qwen3-30B-A3B with some of its layers and random weights in bf16; prompts of random tokens, the
likeliest token each time, so many of them whatever they are. Each way in a process of its own:

    ours              `LanguageModel.stream`, as `moeclipse generate` calls it
    theirs            transformers' `generate` as people call it
    theirs, static    with a static cache, for which it compiles the step

`first` is when the first token of the process was there, from the call on, and `first of 8` that of the first
call with another number of texts; tokens/s are of all texts together, the median of later calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _qwen3 import qwen3_config
from _smoke import BenchParser, device, left_without_gpu, machine, synchronize, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.model.transformer import Transformer
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.vocabulary import ByteVocabulary
from moeclipse.train.generate.text import GenerateConfig, LanguageModel
from moeclipse.train.predict.plan_config import config_for

WAYS = ("ours", "theirs", "theirs, static")
Prompts = Sequence[Sequence[int]]
Write = Callable[[Prompts, int], None]
"""So many tokens behind each prompt."""


def main() -> int:
    smallest = {"model": "tiny", "layers": 2, "tokens": 4, "prompt": 3, "calls": 1, "vocabulary": 256}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--model", default="qwen3-moe-8l", help="a preset, or a name that `plan` knows")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="written in each call")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--calls", type=int, default=5, help="timed, for each number of texts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--one", help="way, in this process")
    given = parser.parse_args()
    if left_without_gpu(__file__, given):
        return 2
    if given.one:
        print("\n" + json.dumps(one(given.one, given)))
        return 0
    rows = [done for way in given.ways if (done := apart(way, given))]
    show(rows)
    speeds = {(row["way"], row["texts"]): row["tokens_per_s"] for done in rows for row in done}
    checks = {
        f"over {way}, {texts}": speeds["ours", texts] / speed
        for (way, texts), speed in speeds.items()
        if way != "ours" and ("ours", texts) in speeds
    }
    print("  ".join(f"{name}: {value:.2f}" for name, value in checks.items()))
    write(given.json, {"rows": rows, "checks": checks, "machine": machine()})
    return int(len(rows) < len(given.ways))


def apart(way: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """In a process of its own; empty: it failed."""
    words = ["--one", way, *(["--smoke"] if given.smoke else [])]
    for name in ("model", "layers", "vocabulary", "prompt", "tokens", "calls"):
        words += [f"--{name}", str(getattr(given, name))]
    words += ["--texts", *map(str, given.texts)]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{way}: failed", file=sys.stderr)
        return []
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def one(way: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """In this process."""
    longest = given.prompt + given.tokens
    config = with_values(
        config_for(given.model),
        {
            "model.num_layers": given.layers,
            "model.vocab_size": given.vocabulary,
            "data.seq_len": longest,
        },
    )
    run = ours(config) if way == "ours" else theirs(config, static=way.endswith("static"))
    draw = torch.Generator().manual_seed(0)
    rows = []
    for texts in given.texts:
        prompts = torch.randint(given.vocabulary, (texts, given.prompt), generator=draw).tolist()
        first, seconds = timed(run, prompts, 1), timed(run, prompts, given.tokens)
        again = [timed(run, prompts, given.tokens) for _ in range(given.calls)]
        each = statistics.median(again)
        rows.append(
            {
                "way": way,
                "texts": texts,
                "tokens_per_s": texts * given.tokens / each,
                "ms_a_token": 1e3 * each / given.tokens,
                "first_s": first,
                "first_call_s": seconds,
            }
        )
    return rows


def timed(run: Write, prompts: Prompts, tokens: int) -> float:
    synchronize()
    begun = time.perf_counter()
    run(prompts, tokens)
    synchronize()
    return time.perf_counter() - begun


def ours(config: TrainConfig) -> Write:
    mesh = Mesh.single(device())
    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    model = Transformer(config.model, config.moe, config.gate, mesh=mesh, dtype=dtype)
    model.requires_grad_(False)
    language = LanguageModel(model, ByteVocabulary())

    def run(prompts: Prompts, tokens: int) -> None:
        how = GenerateConfig(max_tokens=tokens, temperature=0.0)
        for _ in language.stream_tokens(prompts, how):
            pass

    return run


def theirs(config: TrainConfig, *, static: bool) -> Write:
    from transformers import Qwen3MoeForCausalLM

    wanted = qwen3_config(config, config.model.num_layers)
    wanted.use_cache = True
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device() == "cuda" else torch.float32)
    with torch.device(device()):
        model = Qwen3MoeForCausalLM._from_config(wanted, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.eval()
    how: dict[str, Any] = {"cache_implementation": "static"} if static else {}

    def run(prompts: Prompts, tokens: int) -> None:
        ids = torch.tensor(prompts, device=device())
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            **how,
        )

    return run


def show(rows: Sequence[Sequence[dict[str, Any]]]) -> None:
    names = ("tokens_per_s", "ms_a_token", "first_s", "first_call_s")
    print(f"\n{'way':<16} {'texts':>6} " + " ".join(f"{name:>13}" for name in names))
    for row in (row for done in rows for row in done):
        figures = " ".join(f"{row[name]:13.2f}" for name in names)
        print(f"{row['way']:<16} {row['texts']:6} {figures}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
