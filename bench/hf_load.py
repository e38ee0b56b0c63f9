"""How long ranks take to begin from a Hugging Face folder, and how much memory each needs for it.

    .venv/bin/python bench/hf_load.py [--gb 2] [--ranks 4] [--tp 1] [--pp 1] [--json FILE]
    .venv/bin/python bench/hf_load.py --smoke

Writes a random Qwen3-MoE of so many bytes in bfloat16, several files and an index, into a folder that is
removed, and lets ranks on the CPU load it as `moeclipse train --model.from-hf` does. Of each rank: seconds of
the load, memory before it (model, gradients and optimizer state are there, filled with first weights), and
the most during it, as Linux counts it (VmHWM: pages of files that were read count while they are mapped).
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import _smoke
import torch
from safetensors.torch import save_file

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.hf.folder import INDEX, HfFolder, Shapes
from moeclipse.hf.names import tensor_table
from moeclipse.hf.read import read_config
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.hugging_face import load_folder

FILE_BYTES = 400 << 20
LAYER = {
    "model_type": "qwen3_moe",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "architectures": ["Qwen3MoeForCausalLM"],
}
LAYER_BYTES = 2 * (32 * 3 * 1024 * 512 + 2 * 1024 * 64 * 20)
"""Experts and attention of one layer."""
NARROW = {"vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8}
"""Layers of `--smoke`."""


def write(folder: Path, gigabytes: float, layer: dict[str, Any]) -> int:
    """A folder of about this size; returns its bytes."""
    config = {**LAYER, **layer, "num_hidden_layers": max(2, round(gigabytes * 1e9 / LAYER_BYTES))}
    read = read_config(config, "bench")
    shapes = Shapes.of(read.values)
    table = tensor_table(read.family.names, shapes.model, shapes.moe, shapes.gate)
    parts = {part.key: part.shape for tensor in table.values() for part in tensor.parts}
    files: list[dict[str, torch.Tensor]] = [{}]
    placed, total, here = {}, 0, 0

    def close() -> None:
        save_file(files[-1], folder / f"model-{len(files):05d}.safetensors")
        files[-1].clear()

    for key, shape in parts.items():
        if here > FILE_BYTES:
            close()
            files.append({})
            here = 0
        files[-1][key] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        size = files[-1][key].numel() * 2
        total, here = total + size, here + size
        placed[key] = f"model-{len(files):05d}.safetensors"
    close()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def memory(what: str) -> int:
    """Bytes, as /proc tells them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


def load(mesh: Mesh, config: TrainConfig) -> dict[str, float]:
    torch.set_num_threads(1)
    learner = Learner(config, mesh)
    mesh.barrier()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    begun = time.perf_counter()
    load_folder(learner, PatientRanks(mesh, 600))
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "before": before / 1e9, "peak": memory("VmHWM") / 1e9}


def main() -> int:
    parser = _smoke.BenchParser(__doc__, smoke={"gb": 0.0, "ranks": 2})
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = write(folder, given.gb, NARROW if given.smoke else {})
        (folder / "text.txt").write_text("a text of few words " * 400)
        values: dict[str, Any] = {
            **HfFolder.open(folder).values,
            "model.from_hf": name,
            "model.dtype": "bfloat16",
            "optim.state": "bf16",
            "optim.master": "none",
            "optim.main_grad": "bf16",
            "parallel.tp": given.tp,
            "parallel.pp": given.pp,
            "data.files": (f"{name}/text.txt",),
            "data.batch_size": 8,
            "optim.accumulate": given.pp,
        }
        config = with_values(TrainConfig(), values)
        axes = {"tp": given.tp, "pp": given.pp}
        ranks = run_ranks(given.ranks, load, config, deadline_s=900, collective_deadline_s=600, **axes)
    print(f"{total / 1e9:.2f} GB, {given.ranks} ranks (tp {given.tp}, pp {given.pp})")
    print("rank  seconds  before the load (GB)  most during it (GB)  more (GB)")
    for number, row in enumerate(ranks):
        more = row["peak"] - row["before"]
        print(f"{number:4}{row['seconds']:9.1f}{row['before']:22.2f}{row['peak']:21.2f}{more:11.2f}")
    _smoke.write(given.json, {"bytes": total, "ranks": ranks, "machine": _smoke.machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
