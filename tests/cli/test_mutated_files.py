"""Files of every kind, damaged in many ways: no reader ends in a traceback, stands still or grows."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
import resource
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged_folders import make_folders
from damaged_inputs import make_families, make_inputs
from safetensors.torch import save_file

from moeclipse.balance.load import Load
from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.table import read_table
from moeclipse.core.config import to_toml
from moeclipse.core.errors import MoEclipseError
from moeclipse.cost.file import load_costs
from moeclipse.hf.folder import HfFolder, Shapes
from moeclipse.hf.names import tensor_table
from moeclipse.hf.read import read_config
from moeclipse.report.figures import figures
from moeclipse.report.measures import measures_of
from moeclipse.report.run import read_run
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.torch_csv import format_csv, parse_csv
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, Piece, save
from moeclipse.train.config import DataConfig, TrainConfig
from moeclipse.train.data.corpus import open_corpus
from moeclipse.train.presets import merge
from moeclipse.train.run.incidents import withdraw
from moeclipse.train.run.metrics import Metrics
from moeclipse.train.run.run_lock import RunLock, RunningJob
from moeclipse.train.weights.open_model import of_folder

SECONDS, PATIENCE_S = 10, 1800
GROWTH = 1 << 30
VOCABULARY = 300

Reader = Callable[[Path], Any]


def corpus(path: Path, **config: Any) -> None:
    open_corpus(DataConfig(files=(str(path),), **config), VOCABULARY).read(0, 1)


def tokenized(path: Path) -> None:
    text = path.with_name("text.txt")
    text.write_text("one two one")
    open_corpus(DataConfig(files=(str(text),), tokenizer=str(path)), VOCABULARY)


def checkpoint(path: Path) -> None:
    found = Checkpoint.open(path.parent, OneRank())
    for name in found.names:
        found.read(name)


def metrics(path: Path) -> None:
    Metrics(path.parent, writes=True, warmup_steps=0, tensorboard=False).continue_from(3)


def order(path: Path) -> None:
    verify(parse_csv(path.read_text(encoding="utf-8", errors="replace"), path.name))


def job(path: Path) -> None:
    RunLock(path.parent).job()


def of_run(path: Path) -> None:
    run = read_run(path.parent)
    json.dumps(figures([run]), allow_nan=False)
    measures_of(run)


def incidents(path: Path) -> None:
    withdraw(path.parent, since=0.0)


def hf_folder(path: Path) -> None:
    found = HfFolder.open(path.parent)
    for name in found.names:
        found.read(name)


def hf_model(path: Path) -> None:
    of_folder(path.parent)


MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}


def make_hf_folder(folder: Path) -> dict[str, tuple[Path, Reader]]:
    folder.mkdir()
    shapes = Shapes.of(read_config(MIXTRAL, "here").values)
    names = read_config(MIXTRAL, "here").family.names
    table = tensor_table(names, shapes.model, shapes.moe, shapes.gate)
    parts = {part.key: torch.zeros(part.shape) for tensor in table.values() for part in tensor.parts}
    save_file(parts, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(parts, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    hashes = {"config.json": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()}
    (folder / "moeclipse.json").write_text(json.dumps({"sha256": hashes}))
    readers: dict[str, tuple[Path, Reader]] = {
        f"hf {file.name}": (file, hf_folder) for file in sorted(folder.iterdir())
    }
    del readers["hf generation_config.json"]
    for name in ("config.json", "generation_config.json"):
        readers[f"hf model {name}"] = (folder / name, hf_model)
    return readers


def make_documents(folder: Path) -> dict[str, tuple[Path, Reader]]:
    lines = b"".join(json.dumps({"text": f"line {n} [{{", "n": n}).encode() + b"\n" for n in range(30))
    files = {"a.jsonl": lines, "a.txt": lines, "a.jsonl.gz": gzip.compress(lines)}
    if find_spec("zstandard"):
        import zstandard

        files["a.txt.zst"] = zstandard.ZstdCompressor().compress(lines)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        rows = pyarrow.table({"text": ["some text", "other text"] * 20, "n": list(range(40))})
        pyarrow.parquet.write_table(rows, folder / "a.parquet")
        files["a.parquet"] = b""
    return {name: (folder / name, corpus) for name in files}


def make_run_files(folder: Path) -> dict[str, tuple[Path, Reader]]:
    folder.mkdir()
    record = {"step": 1, "loss": 1.0, "step_ms": 5.0, "ranks": {"step_ms": [5.0, 6.0]}, "load": [[1, 2]]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record | {"step": n}) + "\n" for n in range(9)))
    (folder / "summary.json").write_text(json.dumps({"window": "steps 1 to 8", "memory": {"a": 1}}))
    event = {"ph": "X", "pid": 0, "tid": 0, "ts": 1, "dur": 2, "name": "layer 0 F", "args": {}}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [event], "otherData": {"steps": [3]}}))
    (folder / "choices.json").write_text(json.dumps({"ranks": [1, 1], "layers": {}, "placement": None}))
    happened = {"kind": "error", "time": 5.0, "what": "x", "step": 1, "rank": 0}
    (folder / "incidents.jsonl").write_text(json.dumps(happened) + "\n")
    (folder / "config.toml").write_text("[run]\nsteps = 3\n")
    readers = {f"run {file.name}": (file, of_run) for file in sorted(folder.iterdir())}
    return {**readers, "incidents": (folder / "incidents.jsonl", incidents)}


def make_files(folder: Path, every: bool) -> dict[str, tuple[Path, Reader]]:
    """A sound file of every kind, and who reads it; `every`: also what takes seconds to make."""
    files = {
        name: folder / name for name in ("my.toml", "costs.toml", "plan.json", "order.csv", "table.json")
    }
    files["my.toml"].write_text(to_toml(TrainConfig(), comments=True))
    files["costs.toml"].write_text(
        'launch = 1e-6\n[seconds]\nF = 1.0\nB = 2.0\n[contention]\n"compute/a2a" = 0.5\n'
    )
    files["plan.json"].write_text(Placement(((0, 1), (1, 2))).to_json())
    files["order.csv"].write_text(format_csv(build("1f1b", 2, 4)))
    files["table.json"].write_text(json.dumps({"cpu 2": {"chunk_bytes": 4096}}))
    load = folder / "load.npz"
    rows = np.arange(24, dtype=np.int64).reshape(3, 2, 4)
    Load(average_LPE=np.ones((2, 2, 4)), steps_N=np.arange(3), rows_NLE=rows).save(load)
    np.save(folder / "tokens.npy", np.arange(200, dtype=np.uint16))
    (folder / "tokens.bin").write_bytes(np.arange(200, dtype=np.uint16).tobytes())
    words = {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "?": 2}, "unk_token": "?"}
    whitespace = {"type": "Whitespace"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": whitespace, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    lines = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(6))
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "job.json").write_text(json.dumps(vars(RunningJob.here())))
    tensor = torch.arange(12.0)
    pieces = [Piece(name="x", shape=(3, 4), start=0, data=tensor)]
    saved = save(folder / "checkpoints", 1, pieces, {"step": 1}, OneRank(), keep=1)
    readers: dict[str, tuple[Path, Reader]] = {
        "configuration": (files["my.toml"], lambda path: merge(path)),
        "costs": (files["costs.toml"], lambda path: load_costs(str(path))),
        "placement": (files["plan.json"], Placement.load),
        "order": (files["order.csv"], order),
        "all-reduce": (files["table.json"], read_table),
        "loads": (load, Load.read),
        "npy": (folder / "tokens.npy", corpus),
        "bin": (folder / "tokens.bin", corpus),
        "tokenizer": (folder / "tokenizer.json", tokenized),
        "metrics": (folder / "metrics.jsonl", metrics),
        "job": (folder / "job.json", job),
    }
    for file in sorted(saved.iterdir()):
        readers[file.name] = (file, checkpoint)
    readers |= make_hf_folder(folder / "hf")
    readers |= make_folders(folder, MIXTRAL)
    readers |= make_inputs(folder) | make_families(folder / "families") if every else {}
    return readers | make_documents(folder) | make_run_files(folder / "run")


ODD = (None, True, -1, 0, 3, 1e300, -0.5, 10**12, 1 << 70, "", "3", "x", "\x1b[2J", [], {}, [[]], math.nan)


def with_another_value(data: bytes, random_: random.Random) -> bytes:
    """JSON, or a line of it, in which one value is of another kind; other data stay as they are."""
    lines = data.splitlines(keepends=True)
    number = random_.randrange(len(lines)) if data.endswith(b"}\n") and len(lines) > 1 else None
    try:
        whole = json.loads(data if number is None else lines[number])
    except (ValueError, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []
    left = [whole]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else range(len(one))
            places += [(one, key) for key in keys]
            left += [one[key] for key in keys]
    if places:
        holder, key = random_.choice(places)
        if isinstance(holder, dict) and random_.random() < 0.2:
            del holder[key]
        else:
            holder[key] = random_.choice([*ODD, [holder[key]], {"a": holder[key]}])
    told = json.dumps(whole).encode()
    return told if number is None else b"".join([*lines[:number], told + b"\n", *lines[number + 1 :]])


def mutated(data: bytes, random_: random.Random) -> bytes:
    """One of many kinds of damage; sometimes two."""
    if random_.random() < 0.4 and (other := with_another_value(data, random_)) != data:
        return other
    place = random_.randrange(len(data) + 1)
    end = min(place + random_.choice([1, 4, 30, 1000]), len(data))
    noise = random_.randbytes(end - place)
    huge = random_.choice(
        [b"9" * 5000, b"4000000000", b"-1", b"nan", b"1e999", b"null", b'"', b"\0", b"\xff"]
    )
    deep = random_.choice([b"[", b'{"a":', b"(", b"[["]) * 20_000
    kinds = [
        data[:place],
        data[place:],
        data[:place] + noise + data[end:],
        data[:place] + bytes(end - place) + data[end:],
        data[:place] + data[place:end] * 3 + data[end:],
        data[:place] + huge + data[end:],
        data[:place] + deep + data[end:],
        deep,
        b"",
    ]
    if place < len(data):
        flipped = bytes([data[place] ^ 1 << random_.randrange(8)])
        kinds += [data[:place] + flipped + data[place + 1 :]] * 6
    chosen = random_.choice(kinds)
    return mutated(chosen, random_) if chosen and random_.random() < 0.2 else chosen


def address_space() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPeak:"):
            return int(line.split()[1]) * 1024
    return 0


def read_all(folder: Path, count: int, seed: int, every: bool = False) -> None:
    """In a process of its own, which waits for others (templates, tokenizers): on a busy machine for long."""
    run_ranks(1, read_here, folder, count, seed, every, deadline_s=PATIENCE_S)


def read_here(_mesh: Mesh, folder: Path, count: int, seed: int, every: bool) -> None:
    readers = make_files(folder, every)
    for path, reader in readers.values():
        reader(path)  # sound, it is read
        if path.name == "metrics.jsonl":
            path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(6)))
    random_, before = random.Random(seed), address_space()
    refused = 0
    for number in range(count):
        name = sorted(readers)[number % len(readers)]
        path, reader = readers[name]
        sound = path.read_bytes()
        damaged = mutated(sound, random_)
        path.write_bytes(damaged)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(60 * SECONDS)  # of a machine that has other work, too
        try:
            reader(path)
        except MoEclipseError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}, file {number} of seed {seed}: {damaged[:200]!r}") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        path.write_bytes(sound)
    assert address_space() - before < GROWTH
    assert refused > count / 5, "much of the damage is seen; of a text none can be, and a page shows the rest"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20


def test_damaged_files_of_every_kind(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    read_all(tmp_path, 100, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_damaged_files(tmp_path: Path, seed: int) -> None:
    """To write the sound ones costs as much as to read 500 that are damaged."""
    for name in ("tokenizers", "transformers"):
        pytest.importorskip(name)
    read_all(tmp_path, 2500, seed, every=True)
