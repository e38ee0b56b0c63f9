"""A training step of several ranks that share one GPU, beside the step of one rank with all the experts.

    nvidia-cuda-mps-control -d
    .venv/bin/python bench/device_wire.py [--preset 5b] [--ranks 2] [--rounds 5] [--ways ...] [--smoke]

Under MPS every rank has its part of the experts and of the tokens, so that work and device are those of one
rank: what a step takes beyond its step is the price of sharing. Each way runs in processes of its own.

    one             one rank
    blocking        rows by copy engines through memory that ranks map, sizes told to the host
    smart           the same in units
    gathered        all tokens on every rank, over the same memory, a microbatch as one graph
    gathered, nccl  the same over NCCL, which among ranks of one GPU goes through sockets
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _launches import counted
from _smoke import BenchParser, left_without_gpu, machine, write

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

STATIC: dict[str, Any] = {"placement.planner": "static", "moe.shadow": "off", "integrity.every": 0}
GATHERED = {**STATIC, "moe.schedule": "gathered"}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "blocking": {**STATIC, "moe.schedule": "blocking", "moe.transport": "peer"},
    "smart": {**STATIC, "moe.schedule": "smart", "moe.transport": "peer"},
    "gathered": {**GATHERED, "moe.transport": "peer"},
    "gathered, nccl": {**GATHERED, "moe.transport": "direct"},
}
NARROW = {"optim.state": "8bit", "optim.master": "low-bits"}
WARM = 5


def main() -> int:
    parser = BenchParser(__doc__, smoke={"preset": "small", "rounds": 1})
    parser.add_argument("--preset", default="5b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--microbatches", type=int, default=1)
    given = parser.parse_args()
    if left_without_gpu(__file__, given, on_cpu=False):
        return 2
    rows: list[dict[str, Any]] = []
    names = ("step_ms", "over_one", "launches", "gib", "wait_ms", "ready_s", "warm_s", "loss")
    print(f"{'way':16}" + "".join(f"{name:>10}" for name in names) + "  graphs")
    for way in given.ways:
        ranks = 1 if way == "one" else given.ranks
        over: dict[str, Any] = {"device": "cuda", "deadline_s": 400}
        over |= {} if ranks == 1 else {"backend": "nccl"}
        changes = {**WAYS[way], **NARROW, "optim.accumulate": given.microbatches}
        try:
            found = run_ranks(ranks, measure, given.preset, changes, given.rounds, **over)
        except Exception as error:
            print(f"{way:16}  failed: {str(error).splitlines()[0][:140]}", flush=True)
            continue
        row = {"way": way, **found[0], "step_ms": max(one["step_ms"] for one in found)}
        rows.append(row)
        row["over_one"] = row["step_ms"] / rows[0]["step_ms"]
        print(
            f"{way:16}" + "".join(f"{row[name]:10.4g}" for name in names) + f"  {row['graphs']}", flush=True
        )
    write(given.json, {"rows": rows, "machine": machine()})
    return 0


def measure(mesh: Mesh, preset: str, changes: dict[str, Any], rounds: int) -> dict[str, Any]:
    begun = time.perf_counter()
    learner = Learner(with_values(load(preset=preset), changes), mesh)
    ready_s = time.perf_counter() - begun
    times, loss = [], 0.0
    for turn in range(WARM + rounds):
        torch.cuda.synchronize()
        before = time.perf_counter()
        loss = learner.step(turn)["loss"]
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - before))
    with counted() as found:
        learner.step(WARM + rounds)
    graphs = learner.sequential.graphs
    return {
        "step_ms": statistics.median(times[WARM:]),
        "launches": found.number,
        "graphs": graphs is not None and not graphs.refused,
        "gib": torch.cuda.max_memory_reserved() / 2**30,
        "loss": loss,
        "ready_s": ready_s,
        "wait_ms": statistics.median(told.times["exposed_ms"] for told in learner.times.take()),
        "warm_s": 1e-3 * sum(times[:WARM]),
    }


if __name__ == "__main__":
    raise SystemExit(main())
