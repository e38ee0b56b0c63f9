"""Sound folders of which one file is damaged at a time: quantised models, adapters, whole runs, clusters."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moeclipse.cli.place_run import RunFacts
from moeclipse.cli.simulate_run import RunSource, RunTerms, load_run
from moeclipse.comm.mesh import Mesh
from moeclipse.cost.cluster import cluster_at
from moeclipse.hf.folder import HfFolder
from moeclipse.hf.peft import CONFIG, WEIGHTS, adapter_config, adapter_lora, peft_tensors, read_adapter
from moeclipse.hf.read import read_config
from moeclipse.model.lora_config import LoraConfig
from moeclipse.report.advice import advise_run
from moeclipse.report.cures import cures_of
from moeclipse.report.figures import figures
from moeclipse.report.measures import measures_of
from moeclipse.report.page import page_of
from moeclipse.report.run import read_run
from moeclipse.report.skew import skew_of
from moeclipse.train.run.choices import Choices

sys.path.append(str(Path(__file__).parent.parent / "report"))
from made_runs import CHOICES, make_run, make_trace

Reader = Callable[[Path], Any]
BLOCK = 4
CLUSTER = """
device = "h100"
gpus_per_node = 4
near = "nvlink4"
far = { bandwidth = 25e9, latency = 5e-6, efficiency = 0.9 }
[measured]
efficiency = 0.71
memory = 80e9
[kernels]
grouped = 0.8
"""


def make_quantised(folder: Path, plain: Path) -> dict[str, tuple[Path, Reader]]:
    """The same model in blocks of fp8."""
    folder.mkdir()
    theirs = json.loads((plain / "config.json").read_text())
    theirs["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(theirs))
    tensors = {}
    for key, value in load_file(plain / "model.safetensors").items():
        if ".experts." in key:
            rows, columns = (math.ceil(size / BLOCK) for size in value.shape)
            tensors |= {key: value.to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(rows, columns)}
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors")
    return {
        f"quantised {name}": (folder / name, read_folder) for name in ("config.json", "model.safetensors")
    }


def read_folder(path: Path) -> None:
    found = HfFolder.open(path.parent)
    for name in found.names:
        found.read(name)


def make_adapter(folder: Path, theirs: dict[str, Any]) -> dict[str, tuple[Path, Reader]]:
    folder.mkdir()
    shapes, names = HfFolder.open(folder.parent / "hf").shapes, read_config(theirs, "here").family.names
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q", "experts"))
    told = adapter_config(shapes.model, lora, names, "a model")
    (folder / CONFIG).write_text(json.dumps(told))
    parts = peft_tensors(shapes.model, shapes.moe, lora, names)
    save_file({part.key: torch.zeros(part.packed_shape) for part in parts}, folder / WEIGHTS)

    def read(path: Path) -> None:
        asked = adapter_lora(path.parent, shapes.model, names)
        read_adapter(path.parent, shapes.model, shapes.moe, replace(lora, rank=asked.rank or 2), names)

    return {f"adapter {name}": (folder / name, read) for name in (CONFIG, WEIGHTS)}


def make_whole_run(folder: Path) -> dict[str, tuple[Path, Reader]]:
    """With all that a report, its advice and its cures read."""
    make_run(folder, steps=6)
    make_trace(folder)
    (folder / "choices.json").write_text(json.dumps(CHOICES | {"settled": {"pipeline.overlap": "off"}}))
    happened = {"kind": "error", "time": 5.0, "what": "x", "step": 1, "rank": 0}
    (folder / "incidents.jsonl").write_text(json.dumps(happened) + "\n")
    summary = {"window": "steps 3 to 5", "step_ms": 5.0, "compute_ms": 4.0, "comm_ms": 2.0, "mfu": 0.3}
    (folder / "summary.json").write_text(json.dumps(summary))
    readers: dict[str, tuple[Path, Reader]] = {
        f"whole run {name}": (folder / name, read_everything) for name in ("choices.json", "load.npz")
    }
    readers["choices taken over"] = (folder / "choices.json", take_over)
    for name in ("choices.json", "summary.json", "config.toml"):
        readers[f"simulated {name}"] = (folder / name, simulated)
    return readers


def read_everything(path: Path) -> None:
    run, other = read_run(path.parent), read_run(path.parent)
    json.dumps(figures([run, other]), allow_nan=False)
    page_of([run, other])
    measures = measures_of(run)
    advise_run(run, measures)
    cures_of(run, 4, 2)
    skew_of(run)


def simulated(path: Path) -> None:
    RunSource.read(path.parent)
    RunFacts.read(path.parent).ranks  # noqa: B018  (what it is made of was read just now)
    load_run(path.parent, RunTerms(num_ranks=2))


def take_over(path: Path) -> None:
    mesh = Mesh.single()
    Choices(mesh, None).read(str(path.parent), resumed=False)


def make_cluster(path: Path) -> dict[str, tuple[Path, Reader]]:
    path.write_text(CLUSTER)
    return {"cluster": (path, lambda path: cluster_at(str(path)))}


def make_folders(folder: Path, theirs: dict[str, Any]) -> dict[str, tuple[Path, Reader]]:
    """`folder` holds a sound model in `hf`."""
    return {
        **make_quantised(folder / "quantised", folder / "hf"),
        **make_adapter(folder / "adapter", theirs),
        **make_whole_run(folder / "whole"),
        **make_cluster(folder / "cluster.toml"),
    }
