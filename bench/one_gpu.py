"""State and experts in the host's memory on one GPU: all of Qwen3-30B-A3B's shape, and `5b` beside itself.

    .venv/bin/python bench/one_gpu.py --only 5b-resident --only 5b-layers --only 5b-host    one H200, minutes
    .venv/bin/python bench/one_gpu.py --only 30b-none-32k
    .venv/bin/python bench/one_gpu.py --only 30b-low-64k --json one_gpu.json
    .venv/bin/python bench/one_gpu.py --only 30b-lora-64k --only 30b-lora-weights-64k    experts on the host
    .venv/bin/python bench/one_gpu.py --smoke

Each way trains in a process of its own, from random weights that are made in place, and prints a row: peak of
the device (what tensors took, and what all of the process took of it), state on the host, the step, tokens
per second, how much of the copies was hidden, and what was predicted before anything was built. A step is
the time from the end of one to the end of the next. Of rows that differ in places of memory alone it is told
whether losses are equal to the bit. `5b-fsdp` is transformers with torch's offload (`_offloaded.py`). What
does not fit says so in its row.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from _offloaded import BYTES, offloaded_step
from _smoke import BenchParser, device, left_without_gpu, machine, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import MoEclipseError
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.memory_config import MemoryConfig
from moeclipse.train.predict.host_share import hardware_of, placing
from moeclipse.train.predict.plan_config import config_for
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

GIB = 2**30
NARROW = {"optim.state": "8bit", "optim.master": "low-bits", "optim.main_grad": "bf16"}
ROUNDED = {**NARROW, "optim.master": "none"}
LAYERS = {"optim.clip": "layer", "optim.accumulate": 1, "pipeline.recompute": "full"}
HOST = {**LAYERS, "memory.place": "host"}
AUTO = {**LAYERS, "memory.place": "auto"}
SAME = {"data.seq_len": 1024, "data.batch_size": 64, "run.deterministic": True}
MANY = {"data.batch_size": 256, "optim.accumulate": 4, "pipeline.schedule": "layers"}
LONG = {"data.seq_len": 4096}
EXPERTS = {"memory.weights": "host"}
LORA = {**LONG, "lora.rank": 16, "optim.accumulate": 1, "pipeline.recompute": "full", "data.batch_size": 16}
BY_LAYERS = {"optim.accumulate": 4, "pipeline.schedule": "layers"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "5b-resident": ("5b", {**SAME, **NARROW, "optim.accumulate": 1, "pipeline.recompute": "full"}),
    "5b-layers": ("5b", {**SAME, **NARROW, **LAYERS}),
    "5b-host": ("5b", {**SAME, **NARROW, **HOST}),
    "5b-30gib": ("5b", {**SAME, **NARROW, **AUTO, "memory.device_gb": 1.073 * 30}),
    "5b-half": ("5b", {**SAME, **NARROW, **HOST, "memory.share": 0.5}),
    "5b-global": ("5b", {**SAME, **NARROW, **HOST, "optim.clip": "global"}),
    "5b-fsdp": ("5b", SAME),
    "5b-fp32-layers": ("5b", {**SAME, **LAYERS, **MANY}),
    "5b-fp32-host": ("5b", {**SAME, **HOST, **MANY}),
    "30b-none-32k": ("qwen3-30b-a3b", {**LONG, **ROUNDED, **AUTO, "data.batch_size": 8}),
    "30b-none-64k": ("qwen3-30b-a3b", {**LONG, **ROUNDED, **AUTO, "data.batch_size": 16}),
    "30b-low-32k": ("qwen3-30b-a3b", {**LONG, **NARROW, **AUTO, "data.batch_size": 8}),
    "30b-low-64k": ("qwen3-30b-a3b", {**LONG, **NARROW, **AUTO, "data.batch_size": 16}),
    "5b-weights": ("5b", {**SAME, **NARROW, **HOST, **EXPERTS}),
    "5b-weights-alone": ("5b", {**SAME, **NARROW, **LAYERS, **EXPERTS}),
    "30b-lora-64k": ("qwen3-30b-a3b", LORA),
    "30b-lora-weights-64k": ("qwen3-30b-a3b", {**LORA, **EXPERTS}),
    "30b-lora-weights-by-layers": (
        "qwen3-30b-a3b",
        {**LORA, **EXPERTS, **BY_LAYERS, "memory.activations": "host"},
    ),
    "30b-nf4-16k": ("qwen3-30b-a3b", {**LORA, "model.base": "nf4", "data.batch_size": 4}),
    "30b-nf4-weights-16k": (
        "qwen3-30b-a3b",
        {**LORA, **EXPERTS, "model.base": "nf4", "data.batch_size": 4},
    ),
    "30b-none-weights-64k": (
        "qwen3-30b-a3b",
        {**LONG, **ROUNDED, **HOST, **EXPERTS, "memory.share": 0.5, "data.batch_size": 16},
    ),
    "30b-low-128k": ("qwen3-30b-a3b", {**LONG, **NARROW, **AUTO, **MANY, "data.batch_size": 32}),
}
TINY = {
    "data.seq_len": 32,
    "data.batch_size": 4,
    "model.num_layers": 3,
    "model.num_dense_layers": 0,
    "memory.copy_gb_s": 0.5,
    "memory.buffers": 2,
}


def config_of(way: str, steps: int, device_gb: float, smoke: bool) -> TrainConfig:
    shape, changes = WAYS[way]
    base = load(preset="tiny") if smoke else load(preset=shape) if shape == "5b" else config_for(shape)
    changes = {"run.steps": steps, "model.dtype": "bfloat16", "integrity.every": 0, **changes}
    if changes.get("memory.place") == "auto":
        changes.setdefault("memory.device_gb", device_gb)
    changes |= TINY if smoke else {}
    return with_values(base, changes)


def train(way: str, steps: int, device_gb: float, smoke: bool) -> dict[str, Any]:
    """What one way measures; the first two steps are left out of times."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if way.startswith("30b"):  # where all is taken, holes between blocks count
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    config, begun = config_of(way, steps, device_gb, smoke), time.perf_counter()
    there = torch.device(device())
    ended: list[float] = []
    try:
        learner = Learner(config, Mesh.single(device()))
        ready = time.perf_counter() - begun
        records = []
        for step in range(steps):
            records.append(learner.step(step))
            ended.append(time.perf_counter())
    except (torch.OutOfMemoryError, MemoryError, MoEclipseError) as error:
        return {"way": way, "failed": f"does not fit: {str(error).splitlines()[0][:200]}"}
    host = learner.optim.host
    share = 0.0
    if host is not None:
        total = sum(tensor.nbytes for state in learner.optim.states for tensor in state.tensors().values())
        share = host.num_bytes / total
    away = sum(one.num_bytes for one in (host, learner.weights, learner.inputs) if one is not None)
    buckets = (*learner.buckets, *learner.buckets.frozen)
    foreseen = placing(config, (1, 1, 1), 0.0, hardware_of(there), torch.bfloat16, "full", round(share, 2))
    late = [told.times for told in learner.times.take()][min(2, steps - 1) :]
    ms = middle_step(ended)
    comm, exposed = (sum(times[name] for times in late) for name in ("comm_ms", "exposed_ms"))
    return {
        "way": way,
        "parameters": sum(bucket.params.numel() for bucket in buckets),
        "ready_s": ready,
        **device_peak(),
        "host_gib": away / GIB,
        "step_ms": ms,
        "tokens_per_s": 1e3 * learner.tokens_per_step / ms,
        "copies_ms": comm / len(late),
        "exposed_ms": exposed / len(late),
        "hidden": 1 - exposed / comm if comm else 0.0,
        "predicted_ms": 1e3 * foreseen.step_s,
        "predicted_gib": foreseen.peak / GIB,
        "losses": [record["loss"] for record in records],
        "notes": learner.sequential.notes,
    }


def middle_step(ended: list[float]) -> float:
    """Milliseconds; the first two steps are left out, as far as there are more."""
    took = [1e3 * (last - first) for first, last in pairwise(ended)]
    late = sorted(took[1:] or took)
    return late[len(late) // 2]


def device_peak() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {"peak_gib": 0.0, "used_gib": 0.0}
    free, total = torch.cuda.mem_get_info()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "used_gib": (total - free) / GIB}


def train_theirs(way: str, steps: int) -> dict[str, Any]:
    """The same row, as far as they have one; a few steps, each of which takes seconds."""
    config, begun, ended = config_of(way, steps, 0.0, False), time.perf_counter(), []
    step, losses = offloaded_step(config), []
    ready = time.perf_counter() - begun
    for _ in range(min(steps, 4)):
        losses.append(step())
        ended.append(time.perf_counter())
    ms = middle_step(ended)
    tokens = config.data.batch_size * config.data.seq_len
    return {
        "way": way,
        "parameters": 5.04e9,
        "ready_s": ready,
        **device_peak(),
        "host_gib": BYTES * 5.04e9 / GIB,
        "step_ms": ms,
        "tokens_per_s": 1e3 * tokens / ms,
        "copies_ms": 0.0,
        "exposed_ms": 0.0,
        "hidden": 0.0,
        "predicted_ms": 0.0,
        "predicted_gib": 0.0,
        "losses": losses,
    }


def row(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{found['way']:>15}  {found['failed']}"
    return (
        f"{found['way']:>15}  {found['parameters'] / 1e9:5.2f} B  {found['peak_gib']:6.1f} GiB "
        f"({found['used_gib']:.1f} with all, {found['predicted_gib']:.1f} predicted)  "
        f"host {found['host_gib']:6.1f} GiB  "
        f"{found['step_ms']:8.1f} ms ({found['predicted_ms']:.0f} predicted)  {found['tokens_per_s']:8,.0f} "
        f"tokens/s  copies {found['copies_ms']:7.1f} ms, {100 * found['hidden']:3.0f} % hidden  "
        f"loss {found['losses'][-1]:.4f}  ready in {found['ready_s']:.0f} s"
    )


def compared(rows: list[dict[str, Any]], steps: int) -> list[str]:
    """Of ways of `5b`: step beside the first. Of all: losses beside the first that computes the same."""
    ran = [one for one in rows if "failed" not in one]
    small = [one for one in ran if one["way"].startswith("5b")]
    lines = [
        f"{one['way']}: {one['step_ms'] / small[0]['step_ms']:.3f} x the step of {small[0]['way']}"
        for one in small[1:]
    ]
    alike: dict[str, dict[str, Any]] = {}
    for one in ran:
        if one["way"].endswith("fsdp"):
            continue
        config = config_of(one["way"], steps, 0.0, False)
        first = alike.setdefault(str(replace(config, memory=MemoryConfig())), one)
        if first is not one:
            same = "are" if one["losses"] == first["losses"] else "ARE NOT"
            lines.append(f"{one['way']}: {len(one['losses'])} losses {same} those of {first['way']}")
    return lines


def main() -> int:
    smallest = {"steps": 3, "device_gb": 0.02, "only": ["5b-layers", "5b-host", "5b-weights", "30b-low-32k"]}
    parser = BenchParser(__doc__, smoke=smallest)
    parser.add_argument("--only", choices=WAYS, action="append")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device-gb", type=float, default=130.0, help="what 30b may fill of the device")
    given = parser.parse_args()
    if left_without_gpu(__file__, given):
        return 2
    rows: list[dict[str, Any]] = []
    for way in given.only or WAYS:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as alone:
            if way.endswith("fsdp") and not given.smoke:
                rows.append(alone.submit(train_theirs, way, given.steps).result())
            else:
                rows.append(alone.submit(train, way, given.steps, given.device_gb, given.smoke).result())
        print(row(rows[-1]), flush=True)
        for note in rows[-1].get("notes", ()):
            print(f"{'':>17}{note}", flush=True)
        write(given.json, {"machine": machine(), "rows": rows})
    print("\n".join(compared(rows, given.steps)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
