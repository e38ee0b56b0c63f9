"""Steps of two ranks on this CPU: priced from what `moeclipse measure` found, and as they are.

    .venv/bin/python bench/plan_local.py [--json FILE] [--steps 9] [--case ep tp ...]
    .venv/bin/python bench/plan_local.py --device cuda [--steps 5]
    .venv/bin/python bench/plan_local.py --smoke

The machine is measured first, by itself; nothing of the steps is used for fitting but how uneven their gate
was, which no machine knows (what the busiest rank had of the mean, in the mean of layers). Six layouts of one
small model then train on two ranks of one core each, and the median step is compared with the program of each
as the simulator has it on the measured machine. Bytes are not compared: a process holds more than its
tensors. On a machine that does other things the figures say nothing.

With --device cuda: ten configurations on one GPU, seconds and the allocator's peak beside the prediction, by
the constants that come with us and by those just measured.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch
from _smoke import BenchParser, machine, write

from moeclipse.cli.measure import of_machine
from moeclipse.cli.measured_step import busiest
from moeclipse.cli.simulate_run import step_on
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.cost.cluster import Cluster, cluster_at, cluster_from
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

WARM = 3
MODEL: dict[str, Any] = {
    "parallel.peer": "off",
    "pipeline.overlap": "off",
    "pipeline.recompute": "off",
    "model.num_layers": 4,
    "model.vocab_size": 512,
    "model.d_model": 256,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 64,
    "model.dtype": "float32",
    "moe.num_experts": 8,
    "moe.d_ff": 512,
    "moe.schedule": "blocking",
    "moe.shadow": "off",
    "placement.planner": "static",
    "gate.top_k": 2,
    "data.seq_len": 128,
    "data.batch_size": 8,
    "data.files": (__file__,),
    "optim.accumulate": 4,
}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep": ({}, {}),
    "dp": ({"dp": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, {"pipeline.schedule": "1f1b"}),
    "pp, zb-h1": ({"pp": 2}, {"pipeline.schedule": "zb-h1"}),
    "ep, recompute": ({}, {"pipeline.recompute": "full"}),
}


ON_GPU: dict[str, tuple[str, dict[str, Any]]] = {
    "5b": ("5b", {"optim.accumulate": 1}),
    "5b, 2 microbatches": ("5b", {"optim.accumulate": 2}),
    "5b, 4 microbatches": ("5b", {"optim.accumulate": 4}),
    "5b, attention again": ("5b", {"pipeline.recompute": "attn"}),
    "5b, all again": ("5b", {"pipeline.recompute": "full"}),
    "5b, 8-bit states": ("5b", {"optim.state": "8bit"}),
    "5b, adapters": ("5b", {"lora.rank": 16}),
    "5b, frozen experts": ("5b", {"optim.frozen": ("moe.experts",)}),
    "olmoe-12l": ("olmoe-12l", {}),
    "olmoe-12l, 4 microbatches": ("olmoe-12l", {"optim.accumulate": 4}),
}


def on_gpu(steps: int) -> dict[str, Any]:
    """Of each: seconds and GiB, predicted twice and measured."""
    tables, _ = of_machine("cuda")
    known, here = cluster_at(tables["device"]), cluster_from(tables, "measured here")
    found: dict[str, Any] = {"measured": tables, "cases": {}}
    print(f"{'configuration':28} {'ms':>7} {'said':>6} {'fitted':>6} {'GiB':>7} {'said':>6}")
    for name, (preset, changes) in ON_GPU.items():
        config = with_values(load(preset=preset), {"pipeline.recompute": "off", **changes})
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        real, _ = stepped(Mesh.single("cuda"), config, steps)
        taken = torch.cuda.max_memory_allocated() / 2**30
        said, fitted = (
            predicted(config, cluster, {"dp": 1, "tp": 1, "pp": 1}, 1) for cluster in (known, here)
        )
        step = {"measured_ms": real, "predicted_ms": said[0], "fitted_ms": fitted[0]}
        found["cases"][name] = step | {"measured_gib": taken, "predicted_gib": said[1]}
        ratios = f"{said[0] / real:6.2f} {fitted[0] / real:6.2f} {taken:7.1f} {said[1] / taken:6.2f}"
        print(f"{name:28} {real:7.1f} {ratios}", flush=True)
    return found


def stepped(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[float, float]:
    """(milliseconds of the median step of this rank, what the busiest rank had of the mean)."""
    learner = Learner(config, mesh)
    records = [learner.step(step) for step in range(WARM + steps)][WARM:]
    uneven = statistics.mean(busiest(record["load"], mesh.ep * mesh.tp) for record in records)
    return statistics.median(record["step_ms"] for record in records), uneven


def predicted(
    config: TrainConfig, here: Cluster, axes: dict[str, int], ranks: int = 2, imbalance: float = 1.0
) -> tuple[float, float]:
    """(milliseconds, GiB)."""
    dp, tp, pp = (axes.get(name, 1) for name in ("dp", "tp", "pp"))
    ep = ranks // (dp * tp * pp)
    config = with_values(config, {"parallel.tp": tp, "parallel.pp": pp})
    answer = step_on(here, config, (dp, ep), imbalance).answer(config.pipeline.schedule)
    return 1e3 * answer.summary.makespan, max(answer.bytes_of) / 2**30


def main() -> int:
    parser = BenchParser(__doc__, smoke={"steps": 1, "case": ["ep", "pp"]})
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    if given.device == "cuda":
        write(given.json, {"machine": machine(), **on_gpu(given.steps)})
        return 0
    tables, _ = of_machine("cpu")
    here = cluster_from(tables, "measured here")
    found: dict[str, Any] = {"machine": machine(), "measured": tables, "cases": {}}
    print(f"{'layout':16} {'predicted':>10} {'measured':>10} {'ratio':>6} {'busiest':>8}")
    for name in given.case:
        axes, changes = CASES[name]
        config = with_values(TrainConfig(), {**MODEL, **changes})
        of_ranks = run_ranks(2, stepped, config, given.steps, deadline_s=600.0, **axes)
        real, uneven = (max(each) for each in zip(*of_ranks, strict=True))
        said, _ = predicted(config, here, axes, imbalance=uneven)
        step = {"predicted_ms": said, "measured_ms": real, "ratio": said / real, "busiest": uneven}
        found["cases"][name] = step
        print(f"{name:16} {said:7.1f} ms {real:7.1f} ms {said / real:6.2f} {uneven:8.2f}", flush=True)
    write(given.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
