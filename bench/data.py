"""What data costs: reading a gigabyte of tokens beside steps, and tokenising beside the tokenizers library.

    .venv/bin/python bench/data.py [--gigabytes 1.0] [--megabytes 24] [--steps 20] [--json FILE]
    .venv/bin/python bench/data.py --smoke

read        a token file of so many gigabytes (uint16, packed documents) is mapped; the mean time to make the
            batches of a step, against the mean step of the preset `tiny` on one rank. The bar is 2 %.
tokenise    so many megabytes of jsonl through our processes into a cache, against `encode_batch` of the same
            texts with as many threads as there are processes. The bar is 0.8 of its throughput.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from _smoke import BenchParser, machine, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.data_config import DataConfig
from moeclipse.train.documents.cache import num_workers, tokens_of
from moeclipse.train.documents.formats import kind_of
from moeclipse.train.documents.recipe import recipe_of
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

WORDS = 4000


def token_file(folder: Path, gigabytes: float) -> Path:
    """Documents of some hundred tokens, each with a 0 at its end."""
    rng = np.random.default_rng(0)
    left = int(gigabytes * 1e9 / 2)
    path = folder / "tokens.bin"
    with path.open("wb") as file:
        while left > 0:
            block = rng.integers(1, 256, min(left, 1 << 24), dtype=np.uint16)
            block[:: rng.integers(300, 900)] = 0
            file.write(block.tobytes())
            left -= len(block)
    return path


def read(folder: Path, gigabytes: float, steps: int) -> dict[str, float]:
    files = (str(token_file(folder, gigabytes)),)
    keys = {"data.files": files, "data.documents": "packed", "data.end_of_text": "0", "run.device": "cpu"}
    config: TrainConfig = with_values(load(preset="tiny"), keys)
    learner = Learner(config, Mesh.single())
    tokens = len(learner.corpus)
    for step in range(3):
        learner.step(step)
    begun = time.perf_counter()
    for step in range(3, 3 + steps):
        learner.step(step)
    step_s = (time.perf_counter() - begun) / steps
    begun = time.perf_counter()
    for step in range(10_000, 10_000 + steps):  # samples that nobody has read yet
        learner.batches.counted(step)
        for m in range(config.optim.accumulate):
            learner.batches.microbatch(step, m)
    read_s = (time.perf_counter() - begun) / steps
    print(
        f"read: {tokens / 1e9:.2f} e9 tokens ({gigabytes:.1f} GB), batch {config.data.batch_size} x "
        f"{config.data.seq_len}: {1e3 * read_s:.2f} ms of a step of {1e3 * step_s:.1f} ms "
        f"({100 * read_s / step_s:.2f} %, bar 2 %)"
    )
    return {"tokens": tokens, "read_ms": 1e3 * read_s, "step_ms": 1e3 * step_s}


def records(folder: Path, megabytes: float) -> tuple[Path, Path, list[str]]:
    """(jsonl, tokenizer, texts) of words that a byte-level tokenizer has to put together."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choice(list(letters), rng.integers(2, 10))) for _ in range(WORDS)]
    share = 1 / np.arange(1, WORDS + 1)
    texts, size = [], 0
    while size < megabytes * 1e6:
        text = " ".join(rng.choice(words, rng.integers(50, 800), p=share / share.sum()))
        texts.append(text)
        size += len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False)
    tokenizer.train_from_iterator(texts[:200], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder / "a.jsonl", folder / "tokenizer.json", texts


def tokenise(folder: Path, megabytes: float) -> dict[str, float]:
    from tokenizers import Tokenizer

    path, tokenizer, texts = records(folder, megabytes)
    size = sum(map(len, texts))
    config = DataConfig(files=(str(path),), tokenizer=str(tokenizer), end_of_text="")
    recipe = recipe_of(config, tokenizer, 1 << 20, size, plain=False)
    begun = time.perf_counter()
    made = tokens_of([path], [kind_of(path)], recipe, str(folder / "cache"))
    ours = time.perf_counter() - begun
    theirs_tokenizer = Tokenizer.from_file(str(tokenizer))
    os.putenv("RAYON_NUM_THREADS", str(num_workers()))
    begun = time.perf_counter()
    count = sum(len(one.ids) for one in theirs_tokenizer.encode_batch(texts, add_special_tokens=False))
    theirs = time.perf_counter() - begun
    assert count == len(made.tokens), "the same tokens"
    print(
        f"tokenise: {size / 1e6:.0f} MB on {num_workers()} cores: {size / ours / 1e6:.2f} MB/s into a cache, "
        f"{size / theirs / 1e6:.2f} MB/s by the library alone (ratio {theirs / ours:.2f}, bar 0.8)"
    )
    return {"bytes": size, "ours_s": ours, "library_s": theirs}


def main() -> int:
    parser = BenchParser(__doc__, smoke={"gigabytes": 0.002, "megabytes": 0.2, "steps": 1})
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--megabytes", type=float, default=24.0)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {"tokenise": tokenise(Path(folder), given.megabytes)}
        found["read"] = read(Path(folder), given.gigabytes, given.steps)
    write(given.json, {**found, "machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
